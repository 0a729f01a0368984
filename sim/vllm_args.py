"""What a pasted `vllm serve` command line means for the twin.

A flag is followed, ignored (and named in one warning) where it has nothing to do with what is simulated, or
refused by name where it would change the schedule and is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from servetwin.sim.human_readable import human_readable_int
from servetwin.sim.vllm_command_line import CommandLine, VllmArgsError, json_object, read_command_line
from servetwin.sim.vllm_flags import FLAGS, spelled

V2_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_SIZE_THE_POOL = (
    "--tensor-parallel-size", "--gpu-memory-utilization", "--kv-cache-dtype", "--quantization",
    "--kv-cache-memory-bytes", "--enforce-eager", "--cpu-offload-gb",
)  # fmt: skip
"""What the number of KV blocks depends on."""


@dataclass(frozen=True, slots=True)
class VllmArgs:
    """A command line of `vllm serve`, read."""

    engine: dict[str, Any] = field(default_factory=dict)
    """What it sets, by field of the engine flags (`model` is a Path; None: vLLM's default was asked for)."""
    ignored: tuple[str, ...] = ()
    """Flags (and environment variables) that nothing here depends on, as they are typed."""
    limits_nothing: tuple[str, ...] = ()
    """Partial-prefill flags above 1, as they are typed."""

    def without(self, *names: str) -> VllmArgs:
        """The same with these fields ignored: what has no effect in a run is not modelled in it."""
        kept = {name: value for name, value in self.engine.items() if name not in names}
        dropped = tuple(spelled(name) for name in self.engine if name in names)
        return replace(self, engine=kept, ignored=self.ignored + dropped)

    def warnings(self) -> list[str]:
        """What its user must be told, one line each."""
        lines = []
        if self.ignored:
            line = f"--vllm-args: ignored, since not modelled: {', '.join(self.ignored)}"
            if pool := [flag for flag in self.ignored if flag in _SIZE_THE_POOL]:
                line += (
                    f"; of these, {', '.join(pool)} decide the size of the KV pool: give it by "
                    "--num-gpu-blocks-override, the tokens of vLLM's log line `GPU KV cache size` / block size"
                )
            lines.append(line)
        if self.limits_nothing:
            lines.append(f"--vllm-args: {partial_prefill_note(self.limits_nothing)}")
        return lines


def parse_vllm_args(text: str) -> VllmArgs:
    """Reads `[vllm] [serve] MODEL --flag value ...`; its configuration file is read from the current folder.

    Raises VllmArgsError with flag, value and what is allowed for an unknown flag, a value that vLLM would not
    take, and a flag that would change the schedule but is not modelled.
    """
    try:
        return _meaning(read_command_line(text))
    except VllmArgsError as e:
        raise VllmArgsError(f"--vllm-args: {e}") from e


def hint_for_unknown_flag(flag: str) -> str | None:
    """Why a flag of `vllm serve` is none of ours; None for one that vLLM does not have either."""
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    if name in ("max_num_partial_prefills", "max_long_partial_prefills"):
        return f"It would do nothing: {partial_prefill_note((flag,))}."
    if name in FLAGS:
        return (
            "It is a flag of vLLM that is not modelled here; inside --vllm-args it is ignored with a warning."
        )
    return None


def partial_prefill_note(flags: tuple[str, ...]) -> str:
    """Why these partial-prefill flags do not do what they promise."""
    return (
        f"{' and '.join(flags)}: the scheduler of vLLM 0.22.0 limits no partial prefills; above 1, "
        "--max-num-partial-prefills only sets a long_prefill_token_threshold of 0 to 4 % of max_model_len, "
        "and --max-long-partial-prefills is read by nothing"
    )


def _number(value: Any) -> int:
    return human_readable_int(str(value))


def _positive(value: Any) -> int:
    number = _number(value)
    if number < 1:
        raise ValueError(f"{value!r} must be 1 or more")
    return number


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(_positive(item) for item in (value if isinstance(value, list) else [value]))


def _length(value: Any) -> int | None:
    # `auto` is the model's length, cut to what memory holds: where nothing is cut, the default; where it would
    # be, the pool is refused as too small for the default.
    return None if str(value) in ("auto", "-1") else _number(value)


def _one_of(**meanings: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in meanings:
            raise ValueError(f"{value!r} must be one of {', '.join(meanings)}")
        return meanings[value]

    return convert


def _load_format(value: Any) -> str:
    # Every other format is a way to store the same weights; the executor reads what the folder holds.
    return "dummy" if value == "dummy" else "auto"


_MODELLED: dict[str, Callable[[Any], Any]] = {
    "model": Path,
    "load_format": _load_format,
    "dtype": _one_of(
        auto="auto",
        half="float16",
        float16="float16",
        bfloat16="bfloat16",
        float="float32",
        float32="float32",
    ),
    "max_model_len": _length,
    "block_size": _number,
    "num_gpu_blocks_override": _number,
    "kv_cache_memory_bytes": _number,
    "gpu_memory_utilization": float,
    "kv_cache_dtype": str,
    "tensor_parallel_size": _positive,
    "enable_prefix_caching": bool,
    "max_num_seqs": _number,
    "max_num_batched_tokens": _number,
    "max_num_scheduled_tokens": _number,
    "enable_chunked_prefill": bool,
    "long_prefill_token_threshold": _number,
    "max_num_partial_prefills": _positive,
    "scheduling_policy": _one_of(fcfs="fcfs", priority="priority"),
    "scheduler_reserve_full_isl": bool,
    "async_scheduling": bool,
    "enforce_eager": bool,
    "cudagraph_capture_sizes": _numbers,
    "max_cudagraph_capture_size": _positive,
    "performance_mode": _one_of(balanced="balanced", throughput="throughput", interactivity="interactivity"),
}
_INERT = {"performance_mode": "interactivity"}
"""Values that change kernels, not schedules."""
_SPECULATIVE = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""Short flags -> their keys in speculative_config."""
_GRAPH_SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Flags that are also keys of compilation_config."""
_PARTIAL_PREFILLS = ("max_num_partial_prefills", "max_long_partial_prefills")


class _Refusal(NamedTuple):
    """A flag whose value would change the schedule in a way that is not modelled."""

    accepts: Callable[[Any], bool]
    reason: str


def _is_one(value: Any) -> bool:
    return _positive(value) == 1


def _among(*values: str) -> Callable[[Any], bool]:
    return lambda value: value in values


_POOLING = "pooling models are not modelled, only text generation"
_REFUSED: dict[str, _Refusal] = {
    "pipeline_parallel_size": _Refusal(
        _is_one, "pipeline stages keep several batches in flight, which is not modelled; allowed is 1"
    ),
    "data_parallel_size": _Refusal(
        _is_one, "each data-parallel rank schedules for itself, and this is one engine; allowed is 1"
    ),
    "decode_context_parallel_size": _Refusal(
        _is_one, "context parallelism changes the KV blocks, which is not modelled; allowed is 1"
    ),
    "prefill_context_parallel_size": _Refusal(
        _is_one, "context parallelism changes the KV blocks, which is not modelled; allowed is 1"
    ),
    "stream_interval": _Refusal(_is_one, "tokens are not held back from the client; allowed is 1"),
    "scheduler_cls": _Refusal(
        _among(), "vLLM's scheduler classes do not run here; write a policy (--scheduling-policy)"
    ),
    "kv_offloading_size": _Refusal(_among(), "offloading KV blocks to the host is not modelled"),
    "kv_transfer_config": _Refusal(_among(), "moving KV blocks between engines is not modelled"),
    "runner": _Refusal(_among("auto", "generate"), _POOLING),
    "convert": _Refusal(_among("auto", "none"), _POOLING),
    "task": _Refusal(_among("auto", "generate"), _POOLING),
}


def _meaning(line: CommandLine) -> VllmArgs:
    engine: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in _with_graph_flags(line.flags).items():
        if name in _REFUSED:
            _refuse_unless_harmless(name, value)
        elif name in _MODELLED and _INERT.get(name) != value:
            engine[name] = _converted(name, value, _MODELLED[name])
        elif name not in (*_SPECULATIVE, "speculative_config", *_PARTIAL_PREFILLS):
            ignored.append(spelled(name))
    if (speculative := _speculative_config(line.flags)) is not None:
        engine["speculative_config"] = speculative
    if engine.get("enforce_eager"):
        # As in vLLM: nothing is captured, whatever the sizes.
        ignored += [spelled(name) for name in _GRAPH_SIZES if engine.pop(name, None) is not None]
    for name, value in line.environment.items():
        if name == V2_MODEL_RUNNER:
            engine["use_v2_model_runner"] = _switch(name, value)
        else:
            ignored.append(name)
    return VllmArgs(engine, tuple(ignored), _limits_nothing(line.flags))


def _with_graph_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """What other flags say of CUDA graphs as flags of their own; sizes given as such win.

    No graphs are captured if any flag says so: cudagraph_mode NONE, optimization level 0 (unless a mode is given), or
    enforce_eager, which the other two therefore become.
    """
    config = dict(json_object("compilation_config", flags.get("compilation_config", {})))
    kept = {name: config if name == "compilation_config" else value for name, value in flags.items()}
    found = {name: config.pop(name) for name in _GRAPH_SIZES if name in config}
    mode = config.get("cudagraph_mode")
    if mode is None and str(kept.get("optimization_level")) == "0":
        mode = "NONE"
        del kept["optimization_level"]
    if isinstance(mode, str) and mode.upper() == "NONE":
        config.pop("cudagraph_mode", None)
        kept["enforce_eager"] = True
    return found | {name: value for name, value in kept.items() if value != {}}


def _converted(name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except ValueError as e:
        raise VllmArgsError(f"{spelled(name)}: {e}") from e


def _refuse_unless_harmless(name: str, value: Any) -> None:
    refusal = _REFUSED[name]
    if not _converted(name, value, refusal.accepts):
        shown = orjson.dumps(value).decode() if isinstance(value, dict) else value
        raise VllmArgsError(f"{spelled(name)} {shown}: {refusal.reason}")


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise VllmArgsError(f"{name}={value}: must be 0 or 1")
    return value == "1"


def _speculative_config(flags: dict[str, Any]) -> str | None:
    """The configuration of speculative decoding as JSON; the short flags win over the same key in it."""
    given = flags.get("speculative_config")
    config = {} if given in (None, "null") else dict(json_object("speculative_config", given))
    for name, key in _SPECULATIVE.items():
        if name in flags:
            config[key] = _converted(name, flags[name], _positive if name == "spec_tokens" else str)
    return orjson.dumps(config).decode() if config else None


def _limits_nothing(flags: dict[str, Any]) -> tuple[str, ...]:
    above_one = (n for n in _PARTIAL_PREFILLS if n in flags and _converted(n, flags[n], _positive) > 1)
    return tuple(spelled(name) for name in above_one)
