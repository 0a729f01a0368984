"""The turns of the sessions of a trace, beside the turns before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.columns import values_of
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.reuse_points import PrefixedPrompts
from servetwin.workloads.spec import RequestSpec


@dataclass(frozen=True, slots=True)
class SessionTurns:
    """All requests, session by session in order of their beginnings, the turns of each in their order.

    A request without session is a session of one turn.
    """

    turns: IntArray
    """How many each session has, shape [sessions]."""
    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    think_time_s: FloatArray
    """NaN: not known."""
    context_tokens: FloatArray
    """Leading tokens of the prompt that the turn before had, NaN: not known."""
    context_limit: FloatArray
    """Tokens that the turn before had to give, NaN: there is none."""
    prompts: PrefixedPrompts | None
    """In the same order, where all name their prefixes."""

    @property
    def first(self) -> IntArray:
        """Places of the first turns, shape [sessions]."""
        return np.concatenate(([0], np.cumsum(self.turns)[:-1]))

    @property
    def later(self) -> IntArray:
        """Places of all others."""
        return np.setdiff1d(np.arange(len(self.prompt_tokens)), self.first)


def has_sessions(requests: Sequence[RequestSpec]) -> bool:
    """Whether some session has two turns or more."""
    named = [name for name in values_of(requests, "session_id") if name is not None]
    return len(set(named)) < len(named)


def session_turns(requests: Sequence[RequestSpec], prompts: PrefixedPrompts | None) -> SessionTurns:
    """The sessions of requests in order of arrival; `prompts`: all of these, or None."""
    sizes, order = _order(requests)
    prompt_tokens = _numbers(requests, "prompt_tokens", order).astype(np.int64)
    output_tokens = _numbers(requests, "output_tokens", order).astype(np.int64)
    context, limit = (
        _numbers(requests, "context_tokens", order),
        (prompt_tokens + output_tokens).astype(np.float64),
    )
    if prompts is not None:
        prompts = PrefixedPrompts(
            [prompts.ids[i] for i in order], prompt_tokens.tolist(), prompts.block_tokens
        )
        # Ids name prompts only: what the answer gave to the next turn is not known.
        context, limit = _named_alike(prompts)
    limit = np.concatenate(([np.nan], limit[:-1]))
    first = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    context[first] = limit[first] = np.nan
    return SessionTurns(
        turns=sizes,
        arrival_s=_numbers(requests, "arrival_s", order),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        think_time_s=_numbers(requests, "think_time_s", order),
        context_tokens=context,
        context_limit=limit,
        prompts=prompts,
    )


def _order(requests: Sequence[RequestSpec]) -> tuple[IntArray, list[int]]:
    """Turns of each session, and the places of all requests session by session."""
    sessions: dict[str | int, list[int]] = {}
    for i, name in enumerate(values_of(requests, "session_id")):
        sessions.setdefault(i if name is None else name, []).append(i)
    turn = [0 if t is None else t for t in values_of(requests, "turn")]
    ordered = [sorted(places, key=turn.__getitem__) for places in sessions.values()]
    return np.array([*map(len, ordered)], dtype=np.int64), [i for places in ordered for i in places]


def _numbers(requests: Sequence[RequestSpec], name: str, order: list[int]) -> FloatArray:
    return np.array(values_of(requests, name), dtype=np.float64)[order]


def _named_alike(prompts: PrefixedPrompts) -> tuple[FloatArray, FloatArray]:
    """Of each prompt the tokens whose ids the one before has, too, and of the latter all tokens with whole ids."""
    alike = [0]
    whole = prompts.whole_blocks()
    for before, ids in zip(prompts.ids[:-1], whole[1:], strict=True):
        pairs = enumerate(zip(before, ids, strict=False))
        alike.append(next((depth for depth, (a, b) in pairs if a != b), min(len(before), len(ids))))
    block = prompts.block_tokens
    limits = [n // block * block for n in prompts.prompt_tokens]
    return np.array(alike, dtype=np.float64) * block, np.array(limits, dtype=np.float64)
