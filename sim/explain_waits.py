"""What a wait meant: its reason in words, with the figures of the steps in which it was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servetwin.sim.config import EngineConfig
from servetwin.sim.kv_cache_manager import cdiv
from servetwin.sim.records import WaitReason
from servetwin.sim.tables import Tables, ns_array

if TYPE_CHECKING:
    import pandas as pd

MEANINGS = {
    WaitReason.SEATS: "no seat was free",
    WaitReason.BLOCKS: "the blocks for its first chunk were not free",
    WaitReason.GATE: "the blocks for its whole known sequence were not free",
    WaitReason.BUDGET: "the step had too few tokens left for it",
    WaitReason.HEAD_OF_LINE: "another request stood before it and waited",
    WaitReason.PREEMPTION: "a preemption closed admission for the step",
    WaitReason.POLICY: "the scheduling policy did not let it in yet",
}
NAMED_AT_MOST = 3
"""Other requests that one sentence names."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One interval of the log."""

    request_id: str
    reason: WaitReason
    from_ns: int
    until_ns: int
    known_tokens: int | None
    """Prompt and outputs of the request at that time; None where the log of a killed run does not say."""
    replica: int | None = 0
    """Where it waited."""


class Circumstances:
    """The state of an engine while requests waited, as far as the log has it; `replica`: which (None: the only one)."""

    def __init__(self, log: Tables, config: EngineConfig, replica: int | None = None) -> None:
        steps, events = log.steps, log.events
        if replica is not None:
            steps, events = steps[steps.replica == replica], events[events.replica == replica]
        self._config = config
        self._steps = steps
        self._events = events
        self._step_starts = ns_array(steps.start_s)
        self._step_ends = ns_array(steps.end_s)
        self._event_times = ns_array(events.time_s)
        self._event_ends = ns_array(events.until_s)

    def sentence(self, wait: Wait) -> str:
        """What the reason means, with the figures of the first step that found it where the log has that step."""
        figures = self._figures(wait, self.steps_of(wait))
        return f"{MEANINGS[wait.reason]} ({figures})" if figures else MEANINGS[wait.reason]

    def step_ran_at(self, time_ns: int) -> bool:
        """Some step began no later than this and ended no earlier."""
        return bool(((self._step_starts <= time_ns) & (time_ns <= self._step_ends)).any())

    def steps_of(self, wait: Wait) -> pd.DataFrame:
        """The steps whose schedule call found the request waiting for this reason, in order."""
        # Of several steps at one instant the last is meant: the request was not yet queued in the others,
        # or waited for something else.
        first = self._step_starts.searchsorted(wait.from_ns, side="right") - 1
        if first < 0 or self._step_starts[first] < wait.from_ns:
            first += 1
        return self._steps.iloc[first : self._step_starts.searchsorted(wait.until_ns, side="left")]

    def _figures(self, wait: Wait, steps: pd.DataFrame) -> str:
        if wait.reason is WaitReason.HEAD_OF_LINE:
            return self._heads(wait)
        if wait.reason is WaitReason.PREEMPTION:
            return self._victims(wait)
        if steps.empty:
            return ""
        match wait.reason:
            case WaitReason.SEATS:
                return f"{steps.running.iloc[0]} of max_num_seqs {self._config.scheduler.max_num_seqs} ran"
            case WaitReason.BUDGET:
                return self._budget(wait, steps)
            case WaitReason.POLICY:
                first = steps.iloc[0]
                return f"{self._config.scheduler.policy}: {first.running} ran, {first.waiting} waited; {_free(steps)}"
            case _:
                return self._blocks(wait, steps)

    # ------------------------------------------------------------ tokens and blocks

    def _budget(self, wait: Wait, steps: pd.DataFrame) -> str:
        first, budget = steps.iloc[0], self._config.scheduler.token_budget
        spent = first.prefill_tokens + first.decode_tokens
        if spent < budget and wait.known_tokens is not None:
            return (
                f"without chunked prefill its {wait.known_tokens - self._hit_tokens(first)} tokens go into one step; "
                f"{budget - spent} of {budget} were left"
            )
        return f"{spent} of {budget} were spent on {counted(first.rows, 'request')} before it"

    def _blocks(self, wait: Wait, steps: pd.DataFrame) -> str:
        """What it needed against what was free: for the gate all known tokens, else the first chunk."""
        if wait.known_tokens is None:
            return _free(steps)
        first, block_size = steps.iloc[0], self._config.cache.block_size
        hits = self._hit_tokens(first)
        if wait.reason is WaitReason.GATE:
            tokens = wait.known_tokens
            what = f"its {tokens} known tokens need"
        else:
            tokens = hits + self._first_chunk(wait.known_tokens - hits, first)
            after = f" after {hits} hit ones" if hits else ""
            what = f"a first chunk of {tokens - hits} tokens{after} needs"
        need, cached = cdiv(tokens, block_size), hits // block_size
        sentence = f"{what} {counted(need, 'block')}"
        if cached:
            sentence += f", {cached} of them found in the prefix cache"
        if cached and need - cached <= first.free_blocks + first.cached_free_blocks:
            sentence += " (cached blocks that nobody uses are among the free ones and have to be taken too)"
        return f"{sentence}; {_free(steps)}"

    def _first_chunk(self, num_tokens: int, step: pd.Series[int]) -> int:
        scheduler = self._config.scheduler
        threshold = scheduler.long_prefill_token_threshold
        left = scheduler.token_budget - step.prefill_tokens - step.decode_tokens
        return int(min(num_tokens, left, threshold or num_tokens))

    def _hit_tokens(self, step: pd.Series[int]) -> int:
        """Prefix hits of the refused head of the queue: the step's lookups less those of the admitted."""
        admitted = self._events[
            self._events.kind.isin(("scheduled", "resumed")) & (self._events.time_s == step.start_s)
        ]
        hits = step.prefix_hit_tokens + step.preempted_hit_tokens - admitted.computed_tokens.sum()
        # Asynchronous scheduling may admit in another step of the same instant.
        return max(int(hits), 0)

    # ------------------------------------------------------------ other requests

    def _heads(self, wait: Wait) -> str:
        """Who stood before it: at every instant one waiting request has a reason of its own."""
        others = self._events[
            (self._events.kind == "wait")
            & (self._events.reason != WaitReason.HEAD_OF_LINE)
            & (self._event_times < wait.until_ns)
            & (self._event_ends > wait.from_ns)
        ]
        reasons: dict[str, dict[str, None]] = {}
        for request_id, reason in zip(others.request_id, others.reason, strict=True):
            reasons.setdefault(request_id, {})[reason] = None
        return _named([f"{r} ({', '.join(why)})" for r, why in reasons.items()])

    def _victims(self, wait: Wait) -> str:
        victims = self._events[
            (self._events.kind == "preempted")
            & (self._event_times >= wait.from_ns)
            & (self._event_times < wait.until_ns)
        ]
        names = dict.fromkeys("this request" if r == wait.request_id else r for r in victims.request_id)
        return f"preempted: {_named(names)}" if names else ""


def _named(names: Iterable[str]) -> str:
    names = [*names]
    rest = len(names) - NAMED_AT_MOST
    shown = ", then ".join(names[:NAMED_AT_MOST])
    return f"{shown}, and {rest} more" if rest > 0 else shown


def _free(steps: pd.DataFrame) -> str:
    free = steps.free_blocks + steps.cached_free_blocks
    low, high = int(free.min()), int(free.max())
    return f"{counted(low, 'free block')}" if low == high else f"{low} to {high} free blocks while it waited"


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
