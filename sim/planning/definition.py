"""What a sweep is: a base, what varies, how points are chosen, and with how many seeds each is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.planning.named_files import FileDigests
from servetwin.sim.planning.parameters import Choice, Parameter, Range
from servetwin.sim.planning.proposals import (
    Direction,
    Method,
    OptunaProposer,
    Point,
    Proposer,
    grid,
    random,
    sobol,
)
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.runs import SCHEMA_VERSION

MAX_RUNS = 1_000_000
SEED = "seed"


@dataclass(frozen=True)
class SweepDefinition:
    """Equal definitions with equal files give equal tables."""

    base: RunSpec
    parameters: tuple[Parameter, ...]
    method: Method = "grid"
    num_points: int | None = None
    """Points to draw; None: the whole grid."""
    seeds: int = 1
    """Every point is run with so many, from the base's on: the same ones, so that points differ by nothing else."""
    objective: str | None = None
    """The column that is to be small, or large: where Optuna looks, and what is told as the best."""
    direction: Direction = "minimize"

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if self.seeds < 1:
            raise UsageError(f"--seeds {self.seeds}: must be 1 or more")
        if self.seeds > 1 and any(parameter.name == SEED for parameter in self.parameters):
            raise UsageError("--param seed cannot stand beside --seeds, which says how many there are")
        if self.method == "grid":
            if self.num_points is not None:
                raise UsageError(
                    "--runs goes with --method random, sobol or optuna; a grid has its own number"
                )
        elif self.num_points is None or self.num_points < 1:
            got = "it is missing" if self.num_points is None else f"got {self.num_points}"
            raise UsageError(f"--method {self.method} needs --runs, the points to try, 1 or more; {got}")
        elif not self.parameters:
            raise UsageError(f"--method {self.method} needs a --param to vary")
        if self.method == "optuna" and self.objective is None:
            raise UsageError("--method optuna needs --objective, the column to make small or large")
        if (runs := self._count() * self.seeds) > MAX_RUNS:
            raise UsageError(f"the sweep has {runs:,} runs; at most {MAX_RUNS:,} are allowed")

    def _count(self) -> int:
        count = self.num_points or 1
        for parameter in self.parameters if self.method == "grid" else ():
            count *= len(parameter.values) if isinstance(parameter, Choice) else 1
        return count

    def proposer(self) -> Proposer:
        """A new one, from the start. Raises UsageError."""
        if self.method == "grid":
            return grid(self.parameters)
        assert self.num_points is not None, "checked before"
        seed = self.base[SEED]
        if self.method == "optuna":
            return OptunaProposer(self.parameters, self.num_points, seed, self.direction)
        return (random if self.method == "random" else sobol)(self.parameters, self.num_points, seed)

    def specs(self, point: Point) -> list[RunSpec]:
        """The runs of a point, one a seed."""
        spec = self.base.with_read(**point)
        return [spec.with_read(seed=spec[SEED] + i) for i in range(self.seeds)]

    def names(self) -> list[str]:
        """The fields that vary, in the order given."""
        return [parameter.name for parameter in self.parameters]

    def to_json(self, known: FileDigests) -> dict[str, Any]:
        """What tells one sweep from another, its files' bytes included."""
        return {
            "servetwin": version("servetwin"),
            "log_schema": SCHEMA_VERSION,
            **self.base.to_json(),
            **{f"bytes of {name}": digest for name, digest in self.base.file_digests(known).items()},
            **{f"--param {parameter.name}": _wording(parameter) for parameter in self.parameters},
            **{f"bytes of {what}": digest for p in self.parameters for what, digest in _digests(p, known)},
            "--method": self.method,
            "--runs": self.num_points,
            "--seeds": self.seeds,
            "--objective": self.objective,
            "--direction": self.direction,
        }


def _digests(parameter: Parameter, known: FileDigests) -> Iterator[tuple[str, str]]:
    """The files that values name."""
    for value in parameter.values if isinstance(parameter, Choice) else ():
        for name, digest in known.of({parameter.name: value}).items():
            yield f"{name}={value}", digest


def _wording(parameter: Parameter) -> Any:
    return parameter.to_json().get("values") or _range(parameter)


def _range(parameter: Parameter) -> str:
    assert isinstance(parameter, Range), "a choice has values"
    return f"{parameter.low!r}..{parameter.high!r}{':log' if parameter.log else ''}"


def differences(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What differs between two sweeps, in words."""
    missing = "not there"
    return [
        f"{name}: {stored.get(name, missing)} there, {asked.get(name, missing)} here"
        for name in {**stored, **asked}
        if stored.get(name, missing) != asked.get(name, missing)
    ]
