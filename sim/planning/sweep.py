"""A sweep: the runs of its points, taken from a store or done, and the table of them in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from servetwin.sim.commands.errors import InfeasibleError, UsageError
from servetwin.sim.events import MemorySink
from servetwin.sim.metrics import summarize
from servetwin.sim.planning.backends import Backend
from servetwin.sim.planning.definition import SEED, SweepDefinition
from servetwin.sim.planning.named_files import FileDigests
from servetwin.sim.planning.one_run import prepare
from servetwin.sim.planning.proposals import Point
from servetwin.sim.planning.record import OF_A_CLUSTER, Record, figures
from servetwin.sim.planning.results import DONE, FAILED, Results, results_of, results_table
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.store import Store
from servetwin.sim.planning.worker import Task

if TYPE_CHECKING:
    import pyarrow as pa

TRIED = 4
"""Points that are tried out before anything is run: if none of them can start, the sweep is refused."""

NOT_ALWAYS = ("spec_decode", "client_queue", *OF_A_CLUSTER)
"""Parts of the names of figures that only some runs have."""


class PlannedRun(NamedTuple):
    """A row of the table."""

    number: int
    point_number: int
    point: Point
    spec: RunSpec
    spec_hash: str


@dataclass(frozen=True)
class Ended:
    """A run that has ended, as whoever watches is told."""

    record: Record
    reused: bool
    """It was in the store."""


class Sweep:
    """One sweep, from its definition to its table."""

    def __init__(self, definition: SweepDefinition, store: Store, known: FileDigests | None = None) -> None:
        """`known`: digests of files that were read before. Raises UsageError."""
        self.definition = definition
        self._store = store
        self._known = known or FileDigests()
        self._proposer = definition.proposer()
        self.num_points = self._proposer.total
        self.num_runs = self.num_points * definition.seeds
        self._planned: list[PlannedRun] = []
        self._records: dict[str, Record] = {}
        if definition.objective is not None:
            _check_objective(definition)

    def run(self, backend: Backend, on_ended: Callable[[Ended], None] | None = None) -> None:
        """Does what is not in the store yet. Whatever ends it early leaves the records of what had ended."""
        told = on_ended or _tell_nobody
        while points := self._proposer.ask():
            planned = self._plan(points)
            self._planned += planned
            for record in self._stored(planned):
                told(Ended(record, reused=True))
            with closing(self._done(backend, planned)) as done:
                for record in done:
                    told(Ended(record, reused=False))
            self._proposer.tell(self._objectives(planned))

    def first(self) -> list[PlannedRun]:
        """The runs of the first batch, to be looked at; the sweep cannot be run after that."""
        return self._plan(self._proposer.ask())

    def table(self) -> pa.Table:
        """Rows of the runs that have ended so far."""
        return results_table([*self._rows()], self.about)

    def results(self) -> Results:
        return results_of(self.table().to_pandas(), self.about)

    @property
    def about(self) -> dict[str, Any]:
        """What the table says of itself."""
        definition = self.definition
        return {
            "parameters": definition.names(),
            "method": definition.method,
            "seeds": definition.seeds,
            "num_points": self.num_points,
            "num_runs": self.num_runs,
            "objective": definition.objective,
            "direction": definition.direction,
            "workload": definition.base.workload or definition.base["dataset_name"],
            "metric_defs": definition.base["metric_defs"],
        }

    def _plan(self, points: Sequence[Point]) -> list[PlannedRun]:
        first = len(self._planned)
        seeds = self.definition.seeds
        return [
            PlannedRun(first + i * seeds + j, first // seeds + i, point, spec, spec.content_hash(self._known))
            for i, point in enumerate(points)
            for j, spec in enumerate(self.definition.specs(point))
        ]

    def _stored(self, planned: Sequence[PlannedRun]) -> Iterator[Record]:
        """Counted as often as they stand in the plan."""
        for run in planned:
            record = self._store.get(run.spec_hash)
            if record is not None:
                self._records[run.spec_hash] = record
                yield record

    def _done(self, backend: Backend, planned: Sequence[PlannedRun]) -> Generator[Record, None, None]:
        missing: dict[str, list[PlannedRun]] = {}
        for run in planned:
            if run.spec_hash not in self._records:
                missing.setdefault(run.spec_hash, []).append(run)
        here = str(Path.cwd())
        tasks = (Task(spec_hash, runs[0].spec, here) for spec_hash, runs in missing.items())
        # Closed at once when whoever is told ends the sweep, so that nothing runs on.
        with closing(backend.run(tasks)) as contents:
            for content in contents:
                record = Record.from_bytes(content)
                if record.final:
                    self._store.put(record)
                self._records[record.spec_hash] = record
                for _ in missing[record.spec_hash]:
                    yield record

    def _rows(self) -> Iterator[dict[str, Any]]:
        for run in self._planned:
            record = self._records.get(run.spec_hash)
            if record is not None:
                yield _row(run, record)

    def _objectives(self, planned: Sequence[PlannedRun]) -> list[float | None]:
        """The mean over the seeds of each point; None where a run has none."""
        name, means = self.definition.objective, []
        for start in range(0, len(planned), self.definition.seeds):
            runs = planned[start : start + self.definition.seeds]
            values = [_row(run, self._records[run.spec_hash]).get(name or "") for run in runs]
            known = [float(value) for value in values if value is not None]
            means.append(sum(known) / len(known) if len(known) == len(values) else None)
        return means


def check_start(planned: Sequence[PlannedRun]) -> tuple[str, ...]:
    """What the first run that can start has to say of itself.

    Raises what the first one ends with when none of some spread over the plan can: then it is the base that is wrong.
    """
    step = max(1, len(planned) // TRIED)
    first: ValueError | InfeasibleError | None = None
    for run in planned[::step][:TRIED]:
        try:
            prepared = prepare(run.spec)
        except (ValueError, InfeasibleError) as e:
            first = first or e
            continue
        prepared.engine.close()
        return prepared.notes
    assert first is not None, "there is at least one run"
    raise first


def _row(run: PlannedRun, record: Record) -> dict[str, Any]:
    values = figures(record.summary) if record.summary is not None else {}
    return {
        **values,
        "run": run.number,
        "point": run.point_number,
        SEED: run.spec[SEED],
        **run.point,
        "state": DONE if record.error is None else FAILED,
        "error": record.error,
        "spec_hash": record.spec_hash,
        "wall_time_s": record.wall_time_s,
        "host": record.host,
        "date": record.date,
    }


def _check_objective(definition: SweepDefinition) -> None:
    """Figures have the names that an empty run has, too."""
    summary: Mapping[str, Any] = summarize(MemorySink(), definition.base["metric_defs"])
    names = [*figures(summary)]
    if definition.objective not in names and not any(
        part in str(definition.objective) for part in NOT_ALWAYS
    ):
        near = get_close_matches(str(definition.objective), names, n=3, cutoff=0.4)
        raise UsageError(
            f"--objective {definition.objective!r} is no column; near are: {', '.join(near or names[:3])}"
        )


def _tell_nobody(ended: Ended) -> None:
    pass
