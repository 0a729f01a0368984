"""Parts `steps` and `profile`: whole steps of models with random weights, through the product's own runner.

`steps` holds decode steps, run eagerly and from graphs; before the latter are measured, their logits are compared.
`bound_us` is the time in which the device copies as many bytes as the step must read, the weights and the keys and
values of its contexts, and `ratio` that of the forward pass to it.
`profile` is the grid of `executor/profile_grid.py`, whose rows stand in the report as they stand in a profile.
"""

from __future__ import annotations

import random
from functools import partial

from gpu_checks.graphs import compare
from gpu_checks.models import CONFIGS, TOY_CONFIGS, Served, serve
from gpu_checks.session import Row, Session
from gpu_checks.timing import copy_rate
from servetwin.executor.profile_grid import GridLimits, GridPoint, measure_point, profile_grid

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024
TOY_BATCHES, TOY_CONTEXT, TOY_POINTS = (1, 3), 40, 4
REPETITIONS = 10
PROFILED = "Llama-3.1-8B"


MODES = ("eager", "graphs")


def run_steps(session: Session) -> None:
    """Every model, eager and then from graphs."""
    names = list(TOY_CONFIGS if session.toy else CONFIGS)
    session.announce([_comparison(name) for name in names])
    rate = copy_rate(session.device, toy=session.toy)
    for name in names:
        _steps_of(session, name, rate)


def _comparison(name: str) -> str:
    return f"{name} graphs against eager"


def _steps_of(session: Session, name: str, rate: float) -> None:
    served = _served(session, name)
    if served is None:
        for mode in MODES:
            session.leave_out(f"{name} {mode}", "there is no model", model=name, mode=mode)
        return
    _decode_steps(session, name, "eager", served, rate)
    session.measure(f"{name} capture", partial(_capture, session, served), at={"model": name})
    if served.runner.decode_graphs is None:
        session.leave_out(f"{name} graphs", "nothing was captured", model=name, mode="graphs")
        return
    session.measure(_comparison(name), partial(compare, session, served), at={"model": name})
    _decode_steps(session, name, "graphs", served, rate)


def run_profile(session: Session) -> None:
    """The grid for one model, decode batches from graphs."""
    name = next(iter(TOY_CONFIGS)) if session.toy else PROFILED
    served = _served(session, name)
    if served is None:
        return
    session.measure(f"{name} capture", partial(_capture, session, served), at={"model": name})
    limits = GridLimits.of(served.runner, served.max_num_batched_tokens)
    for point in _points(session, limits):
        label = f"{name} {point.kind} {len(point.query_lens)} x {max(point.query_lens)} on {max(point.context_lens)}"
        session.measure(label, partial(measure_point, served.runner, point, _repetitions(session)))


def _served(session: Session, name: str) -> Served | None:
    """The model; building it is a row, too, and so is its failure."""
    found: list[Served] = []

    def build() -> Row:
        found.append(serve(session, name))
        return {"weight_bytes": found[0].weight_bytes, "kv_blocks": len(found[0].runner.kv_caches[0].key)}

    session.measure(f"{name} built", build, at={"model": name}, needs_s=3 if session.toy else 30)
    return found[0] if found else None


def _capture(session: Session, served: Served) -> Row:
    return {"sizes": list(served.capture(session))}


def _points(session: Session, limits: GridLimits) -> list[GridPoint]:
    """In a shuffled order, the same in every run: one that runs out of time has some of every kind."""
    points = profile_grid(limits)
    random.Random(0).shuffle(points)
    return points[:TOY_POINTS] if session.toy else points


def _decode_steps(session: Session, name: str, mode: str, served: Served, rate: float) -> None:
    context = TOY_CONTEXT if session.toy else CONTEXT
    limits = GridLimits.of(served.runner, served.max_num_batched_tokens)
    for batch in TOY_BATCHES if session.toy else BATCHES:
        point = GridPoint("decode", (1,) * batch, (context - 1,) * batch)
        label = f"{name} {mode} batch {batch}"
        at = {"model": name, "mode": mode, "batch": batch, "context": context}
        if not limits.allow(point):
            session.leave_out(label, "its keys and values do not fit into memory", **at)
            continue
        session.measure(label, partial(_decode_step, session, served, point, rate), at=at)


def _decode_step(session: Session, served: Served, point: GridPoint, rate: float) -> Row:
    row = measure_point(served.runner, point, _repetitions(session))
    bound_us = 1e6 * (served.weight_bytes + served.kv_bytes(sum(point.seq_lens))) / rate
    kept = ("graph_tokens", "forward_us", "device_us", "device_us_p10", "device_us_p90", "prepare_us")
    return {key: row[key] for key in kept} | {
        "bound_us": round(bound_us, 2),
        "ratio": round(row["forward_us"] / bound_us, 3),
    }


def _repetitions(session: Session) -> int:
    return 2 if session.toy else REPETITIONS
