"""What one token leaves in the KV cache of one card."""

from __future__ import annotations

from dataclasses import dataclass

from servetwin.sim.model_shape import DTYPE_BYTES, ModelShape

KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes a value of the cache types of vLLM's --kv-cache-dtype that are modelled; auto: the model's own."""


@dataclass(frozen=True, slots=True)
class KVBytes:
    """K and V of one token on one card; every field is a factor of `per_token`."""

    num_layers: int
    width: int
    """Values a layer keeps: KV heads x head size of K and of V, or the latent and its rotary part."""
    value_bytes: int
    formula: str
    """The product spelled out."""

    @property
    def per_token(self) -> int:
        return self.num_layers * self.width * self.value_bytes

    def per_layer(self) -> int:
        """Of one token in one layer."""
        return self.width * self.value_bytes


def kv_bytes(
    shape: ModelShape, dtype: str, kv_cache_dtype: str = "auto", tensor_parallel_size: int = 1
) -> KVBytes:
    """K and V on one of `tensor_parallel_size` cards, all layers counted (a windowed layer, too, is written by every
    token).

    KV heads are divided among the cards and repeated where there are more cards than heads; a latent belongs to all
    heads, so every card has all of it (vLLM 0.22.0). Raises ValueError where heads cannot be divided.
    """
    value = DTYPE_BYTES[dtype] if kv_cache_dtype == "auto" else KV_DTYPE_BYTES[kv_cache_dtype]
    check_division(shape, tensor_parallel_size)
    layers = shape.num_layers
    if (latent := shape.latent) is not None:
        text = (
            f"{layers} layers x ({latent.kv_lora_rank} latent + {latent.qk_rope_head_dim} rotary values, shared by all "
            f"heads) x {value} bytes"
        )
        return _told(layers, latent.width, value, text)
    heads = max(shape.num_kv_heads // tensor_parallel_size, 1)
    split = f" ({shape.num_kv_heads} over {tensor_parallel_size} cards)" if tensor_parallel_size > 1 else ""
    text = f"2 (K and V) x {layers} layers x {heads} KV heads{split} x {shape.head_dim} x {value} bytes"
    return _told(layers, 2 * heads * shape.head_dim, value, text)


def check_division(shape: ModelShape, tensor_parallel_size: int) -> None:
    """Raises ValueError unless attention heads, and KV heads, can be divided among so many cards."""
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size {tensor_parallel_size} must be 1 or more")
    if shape.num_heads % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the {shape.num_heads} attention heads"
        )
    more, fewer = shape.num_kv_heads % tensor_parallel_size, tensor_parallel_size % shape.num_kv_heads
    if shape.latent is None and more and fewer:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} neither divides the {shape.num_kv_heads} KV heads nor is a "
            "multiple of them"
        )


def _told(layers: int, width: int, value: int, text: str) -> KVBytes:
    return KVBytes(layers, width, value, f"{text} = {layers * width * value:,} bytes")
