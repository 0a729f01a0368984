"""The `vllm serve` line of a configuration: the flags that differ from vLLM's defaults."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from servetwin.sim.cards import find_card
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.config import EngineConfig
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.vllm_command_line import read_command_line
from servetwin.sim.vllm_flags import FLAGS, Takes, spelled

LIMITS = ("max_num_seqs", "max_num_batched_tokens")
OWN_POLICIES = "fcfs", "priority"
"""Scheduling policies that vLLM has."""


def serve_line(
    spec: RunSpec, engine: EngineConfig, vllm_args: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """The line, and what of the configuration it cannot say.

    `vllm_args`: the line that was pasted; its flags that nothing here depends on are kept as they were.
    """
    flags: EngineFlags = spec.group("engine")
    pasted = {} if vllm_args is None else dict(read_command_line(vllm_args).flags)
    words = ["vllm", "serve", str(flags.model or pasted.pop("model", None) or "MODEL")]
    pasted.pop("model", None)
    default = EngineFlags()
    ours = {f.name for f in fields(EngineFlags)}
    unsaid: list[str] = []
    for name in (f.name for f in fields(EngineFlags) if f.name not in ("model", "gpu", "vllm_args", *LIMITS)):
        value = getattr(flags, name)
        if value == getattr(default, name):
            continue
        if name == "scheduling_policy" and value not in OWN_POLICIES:
            unsaid.append(f"--scheduling-policy {value} is none of vLLM's")
        elif name in FLAGS:
            words += _words(name, value)
        elif name == "use_v2_model_runner":
            words.insert(0, "VLLM_USE_V2_MODEL_RUNNER=1")
    words += _limits(flags, engine)
    for name, value in pasted.items():
        if name not in ours:
            words += _words(name, value)
    return shlex.join(words), tuple(unsaid)


def _limits(flags: EngineFlags, engine: EngineConfig) -> list[str]:
    """Seats and tokens per step, where vLLM would choose others on that card, or where the card is not known."""
    scheduler = engine.scheduler
    used = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    defaults: tuple[int | None, int | None] = (None, None)
    if flags.gpu is not None and flags.performance_mode == "balanced":
        defaults = find_card(flags.gpu).default_limits()
    pairs = zip(LIMITS, used, defaults, strict=True)
    return [w for name, value, default in pairs if value != default for w in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    takes = FLAGS[name]
    if takes is Takes.NOTHING or isinstance(value, bool):
        return [spelled(name) if value else "--no-" + spelled(name).removeprefix("--")]
    if isinstance(value, list | tuple):
        return [spelled(name), *map(str, value)]
    if isinstance(value, dict):
        import orjson

        return [spelled(name), orjson.dumps(value).decode()]
    return [spelled(name), str(value)]
