"""Makes a failing story short: leaves actions out and makes requests and engine simpler while it still fails alike.

Hypothesis would shrink the choices that led to the story; what a reader wants short are its lines. So this is
delta debugging on the actions themselves: pieces of half the story first, then smaller ones, down to single actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from servetwin.sim.config import EngineConfig
from servetwin.sim.rules import Rules
from servetwin.sim.testing.actions import Action, Arrive
from servetwin.sim.testing.arrival import Arrival
from servetwin.sim.testing.trial import Trial

MOST_STEPS = 6_000
"""Steps told again at most, in all replays together: a bound on the time spent."""
PLAIN_SWITCHES: dict[str, object] = {
    "cache.enable_prefix_caching": False,
    "scheduler.async_scheduling": False,
    "scheduler.enable_chunked_prefill": True,
    "scheduler.long_prefill_token_threshold": 0,
    "scheduler.scheduler_reserve_full_isl": True,
    "rules": Rules(),
}
"""Settings that need no explanation."""
SIZES = ("scheduler.max_num_seqs", "cache.block_size", "model.max_model_len", "cache.num_gpu_blocks")
PLAIN_REQUEST: dict[str, object] = {
    "eos_after": None,
    "predicted_output_tokens": None,
    "shared_tokens": 0,
    "client_id": None,
    "priority": 0,
}

Replay = Callable[[EngineConfig, Sequence[Action]], Trial]
"""Tells a story to its end, or to its failure."""


class Shortener:
    """Looks for the shortest story that breaks the same invariant as `failed`, which is told again by `replay`."""

    def __init__(self, failed: Trial, replay: Replay) -> None:
        self.best = failed
        self._replay = replay
        self._steps_left = MOST_STEPS

    def run(self) -> Trial:
        """The shortest story found."""
        size = None
        while size != self._size():
            size = self._size()
            self._leave_out()
            self._make_engine_plain()
            self._make_requests_plain()
        return self.best

    def _size(self) -> tuple[int, int]:
        numbers = sum(
            a.arrival.prompt_tokens + a.arrival.max_tokens for a in self.best.actions if isinstance(a, Arrive)
        )
        return len(self.best.actions), numbers

    def _fails_alike(self, config: EngineConfig, actions: Sequence[Action]) -> bool:
        if self._steps_left <= 0:
            return False
        told = self._replay(config, actions)
        self._steps_left -= told.seen["steps"]
        if told.broken is not self.best.broken:
            return False
        self.best = told
        return True

    def _leave_out(self) -> None:
        piece = max(len(self.best.actions) // 2, 1)
        while piece:
            start = 0
            while start < len(self.best.actions):
                actions = self.best.actions
                if not self._fails_alike(self.best.config, [*actions[:start], *actions[start + piece :]]):
                    start += piece
            piece //= 2

    def _make_engine_plain(self) -> None:
        """Turns the engine's switches to their plain position and its sizes down, as far as that changes nothing."""
        for name, value in PLAIN_SWITCHES.items():
            self._with_setting(name, value)
        for name in SIZES:
            while any(self._with_setting(name, n) for n in _smaller(_setting(self.best.config, name))):
                pass

    def _with_setting(self, name: str, value: object) -> bool:
        if _setting(self.best.config, name) == value:
            return False
        changed = self.best.config.model_dump()
        *section, field = name.split(".")
        (changed[section[0]] if section else changed)[field] = value
        try:
            config = EngineConfig.model_validate(changed)
        except ValidationError:
            return False
        return self._fails_alike(config, self.best.actions)

    def _make_requests_plain(self) -> None:
        for place in range(len(self.best.actions)):
            self._make_request_plain(place)

    def _make_request_plain(self, place: int) -> None:
        """Takes the first simpler request that still fails, until none does."""
        found = True
        while found and place < len(self.best.actions):
            action = self.best.actions[place]
            found = isinstance(action, Arrive) and any(
                self._fails_alike(self.best.config, self._with(place, replace(action, arrival=arrival)))
                for arrival in _simpler(action.arrival)
            )

    def _with(self, place: int, action: Action) -> list[Action]:
        actions = list(self.best.actions)
        actions[place] = action
        return actions


def _setting(config: EngineConfig, name: str) -> Any:
    return attrgetter(name)(config)


def _simpler(arrival: Arrival) -> Iterator[Arrival]:
    for name, plain in PLAIN_REQUEST.items():
        if getattr(arrival, name) != plain:
            yield replace(arrival, **{name: plain})  # type: ignore[arg-type]
    if arrival.max_tokens > 1:
        # As many tokens to compute, in fewer steps.
        yield replace(arrival, prompt_tokens=arrival.prompt_tokens + arrival.max_tokens - 1, max_tokens=1)
    for count in _smaller(arrival.prompt_tokens):
        yield replace(arrival, prompt_tokens=count)
    for count in _smaller(arrival.max_tokens):
        yield replace(arrival, max_tokens=count)


def _smaller(count: int) -> list[int]:
    """The least number, the half, one less: without repetitions."""
    return sorted({1, count // 2, count - 1} - {0, count})
