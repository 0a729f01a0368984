"""An arrival process as a model file holds it: a profile of the rate, and gaps or a switching rate around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from servetwin.workloads.arrivals import Arrivals, Gamma, Hyperexponential, Poisson, Weibull
from servetwin.workloads.checks import check_positive
from servetwin.workloads.model_part import MAX_LISTED, Part, Positive
from servetwin.workloads.modulated import MMPP
from servetwin.workloads.profiled import Profiled
from servetwin.workloads.quantile_gaps import QuantileGaps
from servetwin.workloads.quantiles import Quantiles


class PoissonGaps(Part):
    """Independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"

    def unit_process(self) -> Arrivals:
        """The process at rate 1."""
        return Poisson(rate_per_s=1.0)


class GammaGaps(Part):
    """Independent Gamma gaps."""

    kind: Literal["gamma"] = "gamma"
    cv: float = Field(ge=1e-3, le=100)
    """Standard deviation of the gaps divided by their mean."""

    def unit_process(self) -> Arrivals:
        """The process at rate 1."""
        return Gamma(rate_per_s=1.0, cv=self.cv)


class WeibullGaps(Part):
    """Independent Weibull gaps."""

    kind: Literal["weibull"] = "weibull"
    shape: float = Field(ge=0.1, le=2000)

    def unit_process(self) -> Arrivals:
        """The process at rate 1."""
        return Weibull(rate_per_s=1.0, shape=self.shape)


class HyperexponentialGaps(Part):
    """Independent gaps from two exponentials with balanced means."""

    kind: Literal["hyperexponential"] = "hyperexponential"
    cv: float = Field(ge=1, le=100)

    def unit_process(self) -> Arrivals:
        """The process at rate 1."""
        return Hyperexponential(rate_per_s=1.0, cv=self.cv)


class ObservedGaps(Part):
    """Independent gaps as they were observed, for traces that none of the others resembles."""

    kind: Literal["observed"] = "observed"
    quantiles: Quantiles
    """Of the gaps, in mean gaps."""

    def unit_process(self) -> Arrivals:
        """The process at rate 1."""
        return QuantileGaps(quantiles=self.quantiles)


class SwitchingRate(Part):
    """MMPP(2): Poisson at one of two rates, between which it switches at random."""

    kind: Literal["mmpp2"] = "mmpp2"
    relative_rates: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
    """The rates of both states; only their ratio matters."""
    stay_mean_gaps: tuple[Positive, Positive]
    """How long each state lasts on average, in mean gaps between requests."""

    def unit_process(self) -> Arrivals:
        """The process at rate 1."""
        (r1, r2), (s1, s2) = self.relative_rates, self.stay_mean_gaps
        mean = (r1 * s1 + r2 * s2) / (s1 + s2)
        check_positive("relative_rates: their mean", mean)
        return MMPP.two_state(rates_per_s=(r1 / mean, r2 / mean), leaving_per_s=(1 / s1, 1 / s2))


Process = PoissonGaps | GammaGaps | WeibullGaps | HyperexponentialGaps | SwitchingRate | ObservedGaps


class ArrivalsModel(Part):
    """When requests are sent, or where they come in sessions, when these begin."""

    process: Annotated[Process, Field(discriminator="kind")]
    rates_per_s: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1, max_length=MAX_LISTED)
    ]
    """The mean rate in each step of the profile, which then begins anew."""
    step_s: Positive
    """How long each step lasts, in seconds."""
    spread_tick_s: Positive | None = None
    """Recorded times were multiples of this, in seconds: requests were spread evenly over it before the fit."""
    bic_above_best: Mapping[str, float] = Field(default_factory=dict)
    """What was tried: each kind of process with its best profile -> its BIC less the smallest one."""

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.build()
        return self

    def build(self, rate_per_s: float | None = None) -> Profiled:
        """The process, at this mean rate over its whole profile (None: as fitted): time squeezed or stretched."""
        own = Profiled(process=self.process.unit_process(), rates_per_s=self.rates_per_s, step_s=self.step_s)
        if rate_per_s is None:
            return own
        check_positive("rate_per_s", rate_per_s)
        faster = rate_per_s / own.rate_per_s
        rates = tuple(rate * faster for rate in own.rates_per_s)
        return Profiled(process=own.process, rates_per_s=rates, step_s=own.step_s / faster)
