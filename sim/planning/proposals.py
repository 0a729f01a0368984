"""Which points a sweep visits: a grid, draws at random or of a Sobol sequence, or what Optuna asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, Protocol

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.planning.parameters import Choice, Parameter
from servetwin.workloads.streams import stream

Method = Literal["grid", "random", "sobol", "optuna"]
Direction = Literal["minimize", "maximize"]
Point = Mapping[str, Any]
"""Field -> value."""
OPTUNA_BATCH = 4
"""Points that Optuna is asked for at once. Fixed, so that the points do not depend on how many run side by side."""


class Proposer(Protocol):
    """Asked for points until there are none, and told how each batch fared."""

    total: int
    """Points in all."""

    def ask(self) -> list[Point]:
        """The next points, to be run side by side; none: that was all."""
        ...

    def tell(self, values: Sequence[float | None]) -> None:
        """The objective at each point of the last batch; None where there is none."""
        ...


class Fixed:
    """Points that are known from the start."""

    def __init__(self, points: list[Point]) -> None:
        self.total = len(points)
        self._rest = points

    def ask(self) -> list[Point]:
        points, self._rest = self._rest, []
        return points

    def tell(self, values: Sequence[float | None]) -> None:
        """They change nothing."""


def grid(parameters: Sequence[Parameter]) -> Fixed:
    """All combinations, the last parameter changing fastest; one point without parameters. Raises UsageError."""
    choices = []
    for parameter in parameters:
        if not isinstance(parameter, Choice):
            raise UsageError(
                f"--param {parameter.name}={parameter.low:g}..{parameter.high:g}: a grid needs values, separated by "
                "commas; a range goes with --method random, sobol or optuna"
            )
        choices.append(parameter.values)
    names = [parameter.name for parameter in parameters]
    return Fixed([dict(zip(names, values, strict=True)) for values in product(*choices)])


def random(parameters: Sequence[Parameter], n: int, seed: int) -> Fixed:
    """`n` points, each parameter drawn by itself and uniformly."""
    return Fixed(_mapped(parameters, stream(seed, "sweep").random((n, len(parameters))).tolist()))


def sobol(parameters: Sequence[Parameter], n: int, seed: int) -> Fixed:
    """The first `n` points of a scrambled Sobol sequence (balanced where n is a power of 2)."""
    from scipy.stats.qmc import Sobol

    sequence = Sobol(len(parameters), scramble=True, rng=stream(seed, "sweep"))
    places = sequence.random_base2(math.ceil(math.log2(n)))[:n]
    return Fixed(_mapped(parameters, places.tolist()))


def _mapped(parameters: Sequence[Parameter], places: list[list[float]]) -> list[Point]:
    return [{p.name: p.at(u) for p, u in zip(parameters, place, strict=True)} for place in places]


class OptunaProposer:
    """Optuna's TPE sampler with a seed: asked and told in order, in batches of a fixed size."""

    def __init__(self, parameters: Sequence[Parameter], n: int, seed: int, direction: Direction) -> None:
        """Raises UsageError where Optuna is not installed."""
        try:
            import optuna
        except ModuleNotFoundError as e:
            raise UsageError("--method optuna needs the package optuna: pip install 'servetwin[plan]'") from e
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.total = n
        self._rest = n
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction=direction)
        self._choices = {p.name: p for p in parameters if isinstance(p, Choice)}
        self._distributions = {p.name: _distribution(optuna, p) for p in parameters}
        self._asked: list[Any] = []

    def ask(self) -> list[Point]:
        size = min(OPTUNA_BATCH, self._rest)
        self._rest -= size
        self._asked = [self._study.ask(self._distributions) for _ in range(size)]
        return [self._point(trial.params) for trial in self._asked]

    def tell(self, values: Sequence[float | None]) -> None:
        for trial, value in zip(self._asked, values, strict=True):
            if value is None or not math.isfinite(value):
                self._study.tell(trial, state=self._failed)
            else:
                self._study.tell(trial, value)

    def _point(self, params: Mapping[str, Any]) -> Point:
        # A choice is known to Optuna by its place: its values may be of any type.
        return {
            name: self._choices[name].values[params[name]] if name in self._choices else params[name]
            for name in self._distributions
        }


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    kinds = optuna.distributions
    if isinstance(parameter, Choice):
        return kinds.CategoricalDistribution(range(len(parameter.values)))
    if parameter.whole:
        return kinds.IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return kinds.FloatDistribution(parameter.low, parameter.high, log=parameter.log)
