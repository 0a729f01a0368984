"""`--speculative-config`: what of vLLM's speculative decoding configuration scheduling depends on."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.config import SpeculativeConfig
from servetwin.sim.scenario import explain

EAGLE_METHODS = ("eagle", "eagle3", "mtp")
"""Draft heads: they are accounted for in one way."""
WITHOUT_EFFECT = (
    "model", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size", "quantization", "revision",
    "rejection_sample_method", "draft_sample_method", "max_model_len", "disable_by_batch_size",
)  # fmt: skip
"""Keys of vLLM that choose or run the drafter, which is modelled by its acceptance rate alone."""


def speculative(text: str | None) -> tuple[SpeculativeConfig | None, list[str]]:
    """(what the JSON says, its keys that have no effect here). Raises UsageError."""
    if text is None:
        return None, []
    try:
        data: Any = orjson.loads(text)
    except orjson.JSONDecodeError as e:
        raise UsageError(f"--speculative-config is no JSON ({e}): {text!r}") from e
    if not isinstance(data, dict):
        raise UsageError(f"--speculative-config must be a JSON object, got {text!r}")
    ignored = [key for key in WITHOUT_EFFECT if data.pop(key, None) is not None]
    if data.get("method") in EAGLE_METHODS:
        data["method"] = "eagle"
    if data.pop("parallel_drafting", False) or data.pop("disable_padded_drafter_batch", False):
        raise UsageError(
            "--speculative-config: parallel_drafting and disable_padded_drafter_batch are not modelled"
        )
    try:
        return SpeculativeConfig.model_validate(data), ignored
    except ValidationError as e:
        raise UsageError(f"--speculative-config: {explain(e)}") from e
