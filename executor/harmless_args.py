"""Engine arguments of vLLM that change nothing here at these values, so that scripts written for it run as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY = object()
HARMLESS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(("quantization", "revision", "tokenizer_revision", "distributed_executor_backend"), (None,)),
    **dict.fromkeys(("kv_cache_dtype", "tokenizer_mode"), ("auto",)),
    **dict.fromkeys(("runner", "task"), ("auto", "generate")),
    **dict.fromkeys(
        (
            "trust_remote_code", "disable_log_stats", "disable_custom_all_reduce", "download_dir",
            "disable_cascade_attn",
        ),
        (ANY,),
    ),
}  # fmt: skip
"""Per argument: the values that are harmless (ANY: all, since nothing here depends on it)."""


def without_harmless(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(what is left, the names taken out). Raises ValueError for a value that would change something."""
    left = {name: value for name, value in arguments.items() if name not in HARMLESS}
    taken = [name for name in arguments if name in HARMLESS]
    for name in taken:
        allowed = HARMLESS[name]
        if ANY not in allowed and arguments[name] not in allowed:
            values = " or ".join(map(repr, allowed))
            raise ValueError(f"{name} {arguments[name]!r} is not modelled here; allowed is {values}")
    return left, taken
