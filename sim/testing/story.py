"""A run told in numbered lines, and the error that carries the shortest one that goes wrong."""

from __future__ import annotations

import traceback
from pathlib import Path

from servetwin.sim.config import EngineConfig
from servetwin.sim.records import EngineCoreOutputs, Frame
from servetwin.sim.units import NS_PER_S

LINES_AT_EACH_END = 30
"""Of a longer story the middle is left out."""


class PolicyError(AssertionError):
    """A policy, or the engine around it, broke an invariant. The text is the shortest story found that shows it."""


class Story:
    """What happened so far."""

    def __init__(self, policy: str, config: EngineConfig) -> None:
        self._policy = policy
        self._config = config
        self._lines: list[str] = []

    def tell(self, line: str) -> None:
        """A new line."""
        self._lines.append(line)

    def add(self, text: str) -> None:
        """What followed at once, on the same line."""
        self._lines[-1] += f"; {text}"

    def ending(self, broken: str, rule: str, found: str) -> str:
        """The whole text: what was broken, the engine, the lines, the rule and the figures."""
        lines = [f"{i}. {line}" for i, line in enumerate(self._lines, start=1)]
        left_out = len(lines) - 2 * LINES_AT_EACH_END
        if left_out > 0:
            lines[LINES_AT_EACH_END:-LINES_AT_EACH_END] = [f"   ({left_out} lines left out)"]
        head = [f"{self._policy} breaks {broken}", f"engine: {_engine_words(self._config)}"]
        return "\n".join([*head, *lines, f"rule: {rule}", f"found: {found}"])


def time_words(now: int) -> str:
    """A simulated instant or length of time, exactly."""
    if now < NS_PER_S:
        return f"{now} ns"
    seconds, rest = divmod(now, NS_PER_S)
    return f"{seconds}.{rest:09d}".rstrip("0").rstrip(".") + " s"


def frame_words(frame: Frame, hit_tokens: dict[str, int]) -> str:
    """What one schedule call decided."""
    said = [
        f"{p.request_id} is preempted and loses {p.computed_tokens} computed tokens"
        for p in frame.record.preempted
    ]
    for request_id, count in frame.plan.num_scheduled_tokens.items():
        hits = hit_tokens.get(request_id)
        gets = f"{request_id} gets {count} token{'' if count == 1 else 's'}"
        said.append(gets + (f" after {hits} from the prefix cache" if hits else ""))
    if not frame.plan.num_scheduled_tokens:
        said.append("nothing is scheduled")
    if frame.record.head is not None:
        said.append(f"{frame.record.head} waits ({frame.record.head_reason})")
    return f"step {frame.step} at {time_words(frame.start_ns)}: " + ", ".join(said)


def outputs_words(frame: Frame, outputs: EngineCoreOutputs) -> str:
    """What one update gave out."""
    said = [f"{r} has an output token" for r in outputs.new_token_ids if r not in outputs.finished]
    said += [f"{r} ends ({finish.reason})" for r, finish in outputs.finished.items()]
    return f"output of step {frame.step}: " + (", ".join(said) or "none")


def raised_words(error: Exception) -> str:
    """An exception and the line of code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"


def _engine_words(config: EngineConfig) -> str:
    cache, scheduler = config.cache, config.scheduler
    said = [
        f"block_size {cache.block_size}",
        f"{cache.usable_blocks} usable blocks",
        f"max_model_len {config.model.max_model_len}",
        f"max_num_seqs {scheduler.max_num_seqs}",
        f"{scheduler.token_budget} tokens a step",
        "asynchronous" if scheduler.async_scheduling else "synchronous",
        f"prefix caching {'on' if cache.enable_prefix_caching else 'off'}",
    ]
    switches = {
        "chunked prefill off": not scheduler.enable_chunked_prefill,
        f"long_prefill_token_threshold {scheduler.long_prefill_token_threshold}": bool(
            scheduler.long_prefill_token_threshold
        ),
        "full-sequence gate off": not scheduler.scheduler_reserve_full_isl,
        "corrections on": bool(config.rules.corrections),
    }
    return ", ".join(said + [words for words, applies in switches.items() if applies])
