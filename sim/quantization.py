"""How a checkpoint's weights are quantized, as `quantization_config` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCALE_BITS = 16
MXFP4_BITS = 4 + 8 / 32
"""4 bits and a shared exponent of 8 bits for every 32 weights."""
NVFP4_BITS = 4 + 8 / 16
"""4 bits and a scale of 8 bits for every 16 weights."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of the linear layers; embeddings, the head and norms keep the model's data type."""

    method: str
    bits: float
    """Bits a weight, scales included."""
    fp8_matmul: bool = False
    """Matrix products run in fp8 (weights and activations); otherwise weights are unpacked to 16 bits first."""
    experts_only: bool = False
    """Everything but the experts keeps the model's data type."""


def read_quantization(settings: dict[str, Any] | None) -> Quantization | None:
    """None where nothing is quantized. Raises ValueError, naming the method, for one whose bits cannot be told."""
    if not settings:
        return None
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "").lower()
    if method in ("fp8", "fbgemm_fp8", "modelopt") and "fp4" not in str(settings.get("quant_algo")).lower():
        return Quantization("fp8", 8, fp8_matmul=True)
    if method in ("modelopt", "modelopt_fp4", "nvfp4"):
        return Quantization("nvfp4", NVFP4_BITS)
    if method == "mxfp4":
        return Quantization("mxfp4", MXFP4_BITS, experts_only=True)
    if method in ("gptq", "awq", "awq_marlin", "gptq_marlin"):
        return _grouped(method, settings.get("bits", settings.get("w_bit")), settings.get("group_size"))
    if method == "bitsandbytes":
        return Quantization(method, 4.5 if settings.get("load_in_4bit") else 8)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    raise ValueError(
        f"quantization_config: quant_method {method!r} is not known; allowed: fp8, gptq, awq, mxfp4, modelopt, "
        "bitsandbytes, compressed-tensors"
    )


def _compressed_tensors(settings: dict[str, Any]) -> Quantization:
    groups = list((settings.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
    if not weights:
        raise ValueError("quantization_config: compressed-tensors without config_groups.*.weights.num_bits")
    first = weights[0]
    if first.get("num_bits") == 8 and first.get("type") == "float":
        return Quantization("fp8", 8, fp8_matmul=True)
    return _grouped("compressed-tensors", first.get("num_bits"), first.get("group_size"))


def _grouped(method: str, bits: Any, group_size: Any) -> Quantization:
    """Integer weights with a scale and a zero point for each group (group size -1 or none: a row, next to nothing)."""
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ValueError(f"quantization_config: {method} with bits {bits!r}; allowed: 1 to 16")
    grouped = isinstance(group_size, int) and group_size > 0
    return Quantization(method, bits + ((SCALE_BITS + bits) / group_size if grouped else 0))
