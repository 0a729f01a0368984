"""A synthetic model of a trace as one object: fitted, written as readable JSON, read again, drawn from.

model = fit_trace(read_trace("trace.csv"))
model.save("model.json")
workload = load_model("model.json").build(n=1000, rate_per_s=4.0, seed=1)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from servetwin.workloads.arrivals import AllAtOnce, Arrivals, Poisson
from servetwin.workloads.checks import check_count
from servetwin.workloads.closed_loop import ClosedLoop, Loop, as_workload
from servetwin.workloads.columns import RequestColumns, column_array
from servetwin.workloads.drawn_sessions import draw_sessions
from servetwin.workloads.fit_arrivals import fit_arrivals
from servetwin.workloads.fit_lengths import LengthsModel, fit_lengths
from servetwin.workloads.fit_prefixes import FITTED_PROMPTS, PrefixesModel, fit_prefixes
from servetwin.workloads.fit_sessions import SessionsModel, fit_sessions
from servetwin.workloads.fitted_arrivals import ArrivalsModel
from servetwin.workloads.model_part import Part
from servetwin.workloads.prompts import LengthsAndPrefixes, Prefixes
from servetwin.workloads.reuse_points import PrefixedPrompts, prefixed_prompts, reuse_points
from servetwin.workloads.session_turns import SessionTurns, has_sessions, session_turns
from servetwin.workloads.spec import ArgumentError, ListWorkload, WorkloadError
from servetwin.workloads.streams import stream
from servetwin.workloads.synthetic import Synthetic
from servetwin.workloads.traces.formats import MODEL_FORMAT
from servetwin.workloads.traces.trace import Trace
from servetwin.workloads.traces.writing import whole_file

VALUE_SHOWN = 60
"""Characters of a wrong value in a message."""
MOST_BYTES = 64_000_000
"""Of a model file: a larger one is something else."""
NO_MODEL = "is no fitted model; where it is a trace, `servetwin trace fit` makes a model of it"


class FittedTo(Part):
    """The trace that a model was fitted to."""

    name: str
    """Of the file or folder, without where it is."""
    format: str
    rows: Annotated[int, Field(ge=1)]
    """Requests emitted by the reader."""
    rows_dropped: Mapping[str, int]
    """Reason -> rows."""
    span_s: Annotated[float, Field(ge=0)]
    """From the first to the last arrival, in seconds."""


class FittedModel(Part):
    """What a trace says about itself, made small; None stands where it says nothing."""

    format: Literal["servetwin workload model"] = MODEL_FORMAT
    version: Literal[1] = 1
    fitted_to: FittedTo
    notes: tuple[str, ...] = ()
    """What a user should know: what is unknown, what was assumed."""
    arrivals: ArrivalsModel | None
    """Of requests; with `sessions`, of their beginnings."""
    lengths: LengthsModel | None
    """Of requests without sessions."""
    sessions: SessionsModel | None
    prefixes: PrefixesModel | None
    """Of all prompts; of first turns where `sessions` say how much of their context later turns keep."""

    @model_validator(mode="after")
    def _one_kind_of_prompts(self) -> Self:
        if (self.lengths is None) == (self.sessions is None):
            raise ValueError("lengths and sessions: one of them must be null, the other not")
        return self

    # ------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Writes it; the file appears under its name only when it is complete."""
        with whole_file(Path(path)) as unfinished:
            unfinished.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Indented, rows of numbers on one line each."""
        return _NUMBERS.sub(lambda found: " ".join(found[0].split()), self.model_dump_json(indent=2)) + "\n"

    # ------------------------------------------------------------ drawing

    def draw(self, n: int | None = None, rate_per_s: float | None = None, seed: int = 0) -> RequestColumns:
        """`n` requests (None: as many as it was fitted to), in order of arrival.

        rate_per_s: another mean rate (of sessions, where there are any): arrivals squeezed or stretched in time;
        infinite: all at once. A model without arrivals needs it and is then Poisson. Raises WorkloadError.
        """
        n = self.fitted_to.rows if n is None else n
        check_count("n", n)
        arrivals = self._arrivals(rate_per_s)
        prefixes = None if self.prefixes is None else self.prefixes.model.build()
        if self.sessions is None:
            assert self.lengths is not None, "checked when it was made"
            prompts = LengthsAndPrefixes(lengths=self.lengths.build(), prefixes=prefixes)
            drawn = Synthetic(arrivals=arrivals, prompts=prompts, n=n, seed=seed).requests
            assert isinstance(drawn, RequestColumns), "Synthetic holds columns"
            return drawn
        if self.sessions.context_share is not None:
            return _columns(draw_sessions(self.sessions, arrivals, prefixes, n, seed))
        drawn = _columns(draw_sessions(self.sessions, arrivals, None, n, seed))
        return drawn if prefixes is None else _with_prefixes(drawn, prefixes, seed)

    def build(
        self, n: int | None = None, rate_per_s: float | None = None, seed: int = 0, loop: Loop = "auto"
    ) -> ListWorkload | ClosedLoop:
        """The same requests as a workload; `loop`: see `as_workload`."""
        requests = self.draw(n, rate_per_s, seed)
        about: dict[str, Any] = {
            "format": "synthetic",
            "requests": len(requests),
            "seed": seed,
            "fitted_to": self.fitted_to.model_dump(),
            "notes": list(self.notes),
        }
        if rate_per_s is not None:
            about["rate_per_s"] = rate_per_s
        return as_workload(requests, about, loop)

    def _arrivals(self, rate_per_s: float | None) -> Arrivals:
        if rate_per_s is not None and math.isinf(rate_per_s) and rate_per_s > 0:
            return AllAtOnce()
        if self.arrivals is not None:
            return self.arrivals.build(rate_per_s)
        if rate_per_s is None:
            raise ArgumentError(
                "rate_per_s",
                f"None: must be given (inf: all at once), since {self.fitted_to.name} had no arrivals to fit",
            )
        return Poisson(rate_per_s=rate_per_s)


_NUMBERS = re.compile(r"[\[{][^\[\]{}a-zA-Z]*[\]}]")
"""A list of numbers, or quantiles."""


def load_model(path: str | Path) -> FittedModel:
    """The model of a file. Raises WorkloadError naming file, field, value and what is allowed."""
    source = Path(path)
    try:
        if source.stat().st_size > MOST_BYTES:
            raise WorkloadError(f"{path}: {NO_MODEL}; it is larger than {MOST_BYTES:,} bytes")
        raw = source.read_bytes()
        if MODEL_FORMAT.encode() not in raw:
            raise WorkloadError(f"{path}: {NO_MODEL}")
        return FittedModel.model_validate_json(raw)
    except OSError as e:
        raise WorkloadError(f"{path}: cannot be read: {e.strerror}") from e
    except ValidationError as e:
        raise WorkloadError(f"{path}: {_first_problem(e)}") from e


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"])) or "the file"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    value = repr(problem["input"])
    shown = value if len(value) <= VALUE_SHOWN else value[:VALUE_SHOWN] + " ..."
    return f"{where} {shown}: {problem['msg'].removeprefix('Value error, ')}"


# ---------------------------------------------------------------- fitting


def fit_trace(trace: Trace) -> FittedModel:
    """The model of a trace: what it does not say stays unknown, and `notes` say so."""
    requests = trace.requests
    prompts = prefixed_prompts(requests)
    sessions = _sessions(requests, prompts)
    arrivals = None
    if trace.arrivals != "none":
        times_s = requests.arrival_s if sessions is None else sessions.arrival_s[sessions.first]
        arrivals = fit_arrivals(times_s)
    if sessions is None:
        lengths, turns = fit_lengths(requests.prompt_tokens, requests.output_tokens), None
    else:
        lengths, turns = None, fit_sessions(sessions, recorded=trace.arrivals == "recorded")
    prefixes = _prefixes(prompts, sessions)
    return FittedModel(
        fitted_to=_fitted_to(trace),
        notes=tuple(_notes(trace, arrivals, turns, prefixes)),
        arrivals=arrivals,
        lengths=lengths,
        sessions=turns,
        prefixes=prefixes,
    )


def _fitted_to(trace: Trace) -> FittedTo:
    times_s = trace.requests.arrival_s
    return FittedTo(
        name=Path(trace.path).name,
        format=trace.format,
        rows=len(trace),
        rows_dropped=trace.rows_dropped,
        span_s=float(times_s[-1] - times_s[0]),
    )


def _sessions(requests: RequestColumns, prompts: PrefixedPrompts | None) -> SessionTurns | None:
    """The sessions; with ids where these connect turns: all prompts have some, and most reuse is of the turn before."""
    if not has_sessions(requests):
        return None
    if prompts is None or len(prompts.ids) < len(requests):
        return session_turns(requests, None)
    named = session_turns(requests, prompts)
    context_percent = 100 * float(np.nansum(named.context_tokens)) / int(named.prompt_tokens.sum())
    reused_percent = reuse_points(prompts.first(FITTED_PROMPTS), sizes=()).infinite_percent
    return named if 2 * context_percent >= reused_percent else session_turns(requests, None)


def _prefixes(prompts: PrefixedPrompts | None, sessions: SessionTurns | None) -> PrefixesModel | None:
    if sessions is None or sessions.prompts is None:
        return None if prompts is None else fit_prefixes(prompts)
    own = sessions.prompts
    first = sessions.first.tolist()
    return fit_prefixes(
        PrefixedPrompts([own.ids[i] for i in first], [own.prompt_tokens[i] for i in first], own.block_tokens)
    )


def _notes(
    trace: Trace,
    arrivals: ArrivalsModel | None,
    sessions: SessionsModel | None,
    prefixes: PrefixesModel | None,
) -> list[str]:
    notes = list(trace.notes)
    if arrivals is None:
        why = "no arrival times" if trace.arrivals == "none" else "all arrivals at one time"
        notes.append(f"{why}: a rate must be given, arrivals are then Poisson")
    elif arrivals.spread_tick_s is not None:
        notes.append(
            f"arrivals were recorded in ticks of {arrivals.spread_tick_s:.6g} s: spread evenly before the fit; "
            "what happens within a tick is not known"
        )
    if prefixes is None and (sessions is None or sessions.context_share is None):
        notes.append("prefix reuse unknown: the trace names no prefixes, so made-up prompts share nothing")
    elif prefixes is None:
        notes.append(
            "prefix reuse between sessions unknown: made-up prompts share only their own session's context"
        )
    if sessions is not None and sessions.pauses is None:
        notes.append("pauses between turns unknown: later turns have no think time")
    return notes


def _columns(columns: Mapping[str, Any]) -> RequestColumns:
    import pyarrow as pa

    ids = [f"req-{i:06d}" for i in range(len(columns["arrival_s"]))]
    arrays = {name: column_array(name, values) for name, values in {"request_id": ids, **columns}.items()}
    return RequestColumns(pa.table(arrays)).in_order_of_arrival()


def _with_prefixes(requests: RequestColumns, prefixes: Prefixes, seed: int) -> RequestColumns:
    """The same, with ids in order of arrival."""
    attached = prefixes.attach(requests.prompt_tokens, stream(seed, "prefixes"))
    for name, values in attached.items():
        requests = requests.with_column(name, values)
    return requests
