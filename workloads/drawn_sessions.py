"""Requests of made-up sessions, drawn from a fitted model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from servetwin.workloads.arrivals import Arrivals, FloatArray, send_times_s
from servetwin.workloads.fit_sessions import SessionsModel
from servetwin.workloads.lengths import IntArray
from servetwin.workloads.prompts import Prefixes
from servetwin.workloads.quantiles import values_at
from servetwin.workloads.streams import stream


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the n requests stand: session by session."""

    session: IntArray
    turn: IntArray

    @property
    def first(self) -> IntArray:
        return np.flatnonzero(self.turn == 0)


def draw_sessions(
    model: SessionsModel, arrivals: Arrivals, prefixes: Prefixes | None, n: int, seed: int
) -> dict[str, Any]:
    """Columns of `n` requests, session by session (the last one may be cut); a longer draw begins with a shorter one.

    Streams under the root `seed`: arrivals, turns, pauses, context, prefixes, and those of the lengths.
    """
    places = _places(model, n, stream(seed, "turns"))
    added, outputs = _lengths(model, places, seed)
    share = values_at(model.context_share or {0: 0.0, 1: 0.0}, stream(seed, "context").random(n))
    prompts, contexts = _grown(model, places, added, outputs, share)
    starts_s = send_times_s(arrivals, len(places.first), seed)[places.session]
    columns: dict[str, Any] = {
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "session_id": [f"session-{session:06d}" for session in places.session.tolist()],
        "turn": places.turn,
    }
    columns |= _times(model, places, starts_s, stream(seed, "pauses").random(n))
    if prefixes is not None:
        return columns | _ids(prefixes, places, prompts, contexts, stream(seed, "prefixes"))
    if model.context_share is not None:
        columns["context_tokens"] = _later(places, contexts.tolist())
    return columns


def _places(model: SessionsModel, n: int, rng: np.random.Generator) -> _Places:
    turns = np.empty(0, dtype=np.int64)
    while turns.sum() < n:
        more = np.rint(values_at(model.turns, rng.random(max(16, n // 4)))).astype(np.int64)
        turns = np.concatenate((turns, more))
    session = np.repeat(np.arange(len(turns)), turns)[:n]
    first = np.concatenate(([0], turns.cumsum()[:-1]))
    return _Places(session, np.arange(n) - first[session])


def _lengths(model: SessionsModel, places: _Places, seed: int) -> tuple[IntArray, IntArray]:
    """Tokens that each request adds, and of its answer, shape [n] each."""
    n = len(places.turn)
    # Roots of their own: first and later turns share the names of their streams.
    first_seed, later_seed = stream(seed, "lengths of turns").integers(2**62, size=2).tolist()
    first, later = (
        model.first.build().sample_pairs(n, first_seed),
        model.later.build().sample_pairs(n, later_seed),
    )
    begins = places.turn == 0
    return np.where(begins, first[0], later[0]), np.where(begins, first[1], later[1])


def _grown(
    model: SessionsModel, places: _Places, added: IntArray, outputs: IntArray, share: FloatArray
) -> tuple[IntArray, IntArray]:
    """Prompt tokens, and those of them that are context, shape [n] each."""
    with_answer = model.context_of == "prompt and answer"
    prompts, contexts = [], []
    before = 0
    rows = zip(places.turn.tolist(), added.tolist(), outputs.tolist(), share.tolist(), strict=True)
    for turn, new, answer, kept in rows:
        room = max(0, model.longest_prompt_tokens - new)
        context = min(round(kept * before), room) if turn else 0
        prompts.append(context + new)
        contexts.append(context)
        before = prompts[-1] + (answer if with_answer else 0)
    return np.array(prompts, dtype=np.int64), np.array(contexts, dtype=np.int64)


def _times(model: SessionsModel, places: _Places, starts_s: FloatArray, draws: FloatArray) -> dict[str, Any]:
    """Later turns without times of their own stand at the start of their session."""
    if model.pauses is None:
        return {"arrival_s": starts_s}
    pauses_s = np.where(places.turn > 0, values_at(model.pauses.seconds, draws), 0.0)
    if model.pauses.between == "end and start":
        return {"arrival_s": starts_s, "think_time_s": _later(places, pauses_s.tolist())}
    passed_s = pauses_s.cumsum()
    return {"arrival_s": starts_s + passed_s - passed_s[places.first][places.session]}


def _ids(
    prefixes: Prefixes, places: _Places, prompts: IntArray, contexts: IntArray, rng: np.random.Generator
) -> dict[str, Any]:
    """Ids of first turns as the model of prefixes has them; later turns begin with those of their context."""
    first = prefixes.attach(prompts[places.first], rng)
    block = int(first["prefix_block_tokens"][0])
    given = [list(map(int, ids)) for ids in first["prefix_ids"]]
    fresh = max((max(ids, default=-1) for ids in given), default=-1) + 1
    own = iter(given)
    ids: list[list[int]] = []
    for turn, prompt, context in zip(places.turn.tolist(), prompts.tolist(), contexts.tolist(), strict=True):
        if turn == 0:
            ids.append(next(own))
            continue
        kept, wanted = ids[-1][: context // block], -(-prompt // block)
        ids.append(kept + [*range(fresh, fresh + wanted - len(kept))])
        fresh += wanted - len(kept)
    return {"prefix_ids": ids, "prefix_block_tokens": np.full(len(ids), block)}


def _later(places: _Places, values: list[Any]) -> list[Any]:
    """These for later turns; a first one has none."""
    return [value if turn else None for turn, value in zip(places.turn.tolist(), values, strict=True)]
