"""Loads a local Hugging Face folder: transformers' own modelling code with our attention inside."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from servetwin.executor.attention import ATTENTION_NAME
from servetwin.executor.cpu_features import cpu_has_bfloat16
from servetwin.executor.kv_cache import KVCacheSpec
from servetwin.executor.rope import default_max_model_len, fix_rope, max_positions, why_unsupported_rope
from servetwin.executor.supported_models import SUPPORTED_MODEL_TYPES as SUPPORTED_MODEL_TYPES
from servetwin.executor.supported_models import why_unsupported

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
"""How transformers computes mixtures of experts: every token by its own experts alone, and without branches that
depend on data, so that it compiles. The first wants matrices whose rows are whole multiples of 16 bytes."""

CONFIG_ERRORS = (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What transformers raises for a configuration that it cannot use."""
WEIGHT_ERRORS = (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError)
"""What it raises for weight files that are missing or damaged."""


class ModelLoadError(ValueError):
    """A model folder that cannot be served; the message says what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in evaluation mode, and what the engine needs to know of it."""

    model: PreTrainedModel
    name: str
    """Name of the folder."""
    max_positions: int
    """Longest context that its positions allow, in tokens."""
    max_model_len: int
    """Longest context that it is set up for, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """The first one is the end-of-sequence token, the others end a text as well."""
    kv_cache_spec: KVCacheSpec
    sliding_window: int | None
    """Set when some layer attends to the last so many tokens only."""
    num_parameters: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_model(
    folder: Path,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    device: torch.device,
    seed: int = 0,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Loads `folder` (never from the network). `load_format="dummy"`: random weights drawn with `seed`.

    `max_model_len`: longest context in tokens, which some rope types depend on (None: the model's default).
    Raises ModelLoadError for a missing or damaged folder, for a model that is not supported, and for a
    `max_model_len` above its positions.
    """
    config = read_config(folder)
    name = folder.resolve().name
    check_max_model_len(max_model_len, config, name)
    torch_dtype = resolve_dtype(dtype, config.dtype, device)
    if load_format == "dummy":
        model = _random_model(folder, config, torch_dtype, device, seed)
    else:
        model = _pretrained_model(folder, config, torch_dtype, device)
    return describe_model(model, name, max_model_len)


def describe_model(model: PreTrainedModel, name: str, max_model_len: int | None = None) -> LoadedModel:
    """Makes a model built elsewhere (with our attention) ready for serving and reads off what is needed.

    Raises ModelLoadError for a `max_model_len` above its positions.
    """
    config = model.config
    max_model_len = check_max_model_len(max_model_len, config, name)
    model.train(False)
    fix_rope(model, max_model_len)
    if hasattr(config, "num_experts"):
        widths = config.hidden_size, config.moe_intermediate_size
        odd = any(width * model.dtype.itemsize % 16 for width in widths)
        model.set_experts_implementation(EXPERTS_IMPLEMENTATIONS[odd])
    return LoadedModel(
        model=model,
        name=name,
        max_positions=max_positions(config),
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(model),
        kv_cache_spec=kv_cache_spec(config, model.dtype),
        sliding_window=_sliding_window(config),
        num_parameters=sum(p.numel() for p in model.parameters()),
    )


def check_max_model_len(wanted: int | None, config: PretrainedConfig, name: str) -> int:
    """The longest context in tokens: as wanted, else the model's default. ModelLoadError above its positions."""
    if wanted is None:
        return default_max_model_len(config)
    if wanted > max_positions(config):
        raise ModelLoadError(
            f"max_model_len {wanted} is above the {max_positions(config)} positions of model {name!r}"
        )
    return wanted


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration, checked for what this executor supports."""
    if not folder.is_dir():
        raise ModelLoadError(f"model {str(folder)!r} is not a folder: give a local Hugging Face model folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"model folder {str(folder)!r} has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelLoadError(f"{str(path)!r} is not valid JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{str(path)!r} must hold a JSON object, not {type(raw).__name__}")
    reason = why_unsupported(raw)
    if reason is not None:
        raise ModelLoadError(f"{str(path)!r}: {reason}")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except CONFIG_ERRORS as e:
        raise ModelLoadError(
            f"{str(path)!r} is not a usable {raw['model_type']} configuration: {_one_line(e)}"
        ) from e
    reason = why_unsupported_rope(config)
    if reason is not None:
        raise ModelLoadError(f"{str(path)!r}: {reason}")
    return config


def resolve_dtype(
    wanted: Literal["auto", "float32", "bfloat16"], of_config: torch.dtype | str | None, device: torch.device
) -> torch.dtype:
    """The type to compute in.

    `auto` follows the configuration, with float16 taken as bfloat16, and bfloat16 on a CPU without bfloat16
    arithmetic as float32 (float16 is several hundred times slower on CPUs).
    """
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    if of_config not in (torch.bfloat16, torch.float16):
        return torch.float32
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bfloat16() else torch.float32


def _random_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices), device:
        torch.manual_seed(seed)
        # Any: transformers' automatic classes have no complete type information.
        auto: Any = AutoModelForCausalLM
        try:
            model: PreTrainedModel = auto.from_config(
                config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
            )
        except CONFIG_ERRORS as e:
            raise ModelLoadError(f"cannot build the model in {str(folder)!r}: {_one_line(e)}") from e
    return model


def _pretrained_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    try:
        with _without_progress_bar():
            model, info = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                # Reported below, with names.
                ignore_mismatched_sizes=True,
            )
    except (*WEIGHT_ERRORS, *CONFIG_ERRORS) as e:
        raise ModelLoadError(
            f"cannot load the model in {str(folder)!r}: {_one_line(e)} (--load-format dummy needs none)"
        ) from e
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            names = ", ".join(sorted(str(key) for key in info[problem])[:5])
            raise ModelLoadError(
                f"the weights in {str(folder)!r} do not belong to its config.json: {len(info[problem])} "
                f"{problem.replace('_', ' ')}, among them {names}"
            )
    loaded: PreTrainedModel = model.to(device)
    return loaded


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Keeps transformers' own bar off stderr, where ours stands; its setting is left as it was."""
    switch: Any = transformers_logging
    shown = switch.is_progress_bar_enabled()
    switch.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            switch.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def kv_cache_spec(config: PretrainedConfig, dtype: torch.dtype) -> KVCacheSpec:
    """Shape of the cache, from the names that the supported configurations use."""
    num_heads = config.num_attention_heads
    return KVCacheSpec(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=dtype,
    )


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End tokens of config.json, then those that generation_config.json adds."""
    generation = getattr(model.generation_config, "eos_token_id", None)
    ids: dict[int, None] = {}
    for value in (model.config.eos_token_id, generation):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids[token_id] = None
    return tuple(ids)


def _sliding_window(config: PretrainedConfig) -> int | None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return window
