"""Named synthetic workloads, shaped like published statistics of real services.

Both follow Azure's LLM inference traces of 2023 (Microsoft, AzurePublicDataset, CC-BY 4.0) in rate,
coefficient of variation of the gaps, and p50, p90 and p99 of the lengths (exactly) and their means (within
5 %). Input and output are drawn independently of each other (measured correlation: conv -0.11, code 0.00),
and no prefixes are shared, since the traces say nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from servetwin.workloads.arrivals import Arrivals, Gamma, Hyperexponential
from servetwin.workloads.lengths import Lengths, QuantileGrid
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.synthetic import Synthetic

DEFAULT_N = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named synthetic workload."""

    name: str
    description: str
    """One line for people; begins with the word synthetic."""
    rate_per_s: float
    """Requests per second unless another rate is asked for."""
    arrivals: Callable[[float], Arrivals]
    """The arrival process at a given rate in requests per second."""
    input_lengths: Lengths
    output_lengths: Lengths

    def build(self, *, n: int | None = None, rate_per_s: float | None = None, seed: int = 0) -> Synthetic:
        """`n` requests (default 1000); another rate only squeezes or stretches the arrivals in time."""
        rate = self.rate_per_s if rate_per_s is None else rate_per_s
        workload = Synthetic(
            arrivals=self.arrivals(rate),
            input_lengths=self.input_lengths,
            output_lengths=self.output_lengths,
            n=DEFAULT_N if n is None else n,
            seed=seed,
        )
        workload.about |= {"preset": self.name, "description": self.description, "rate_per_s": rate}
        return workload


CHAT = Preset(
    name="chat",
    description="synthetic: like a conversation service (Azure 2023 conv: 5.53 requests/s, gap CV 1.09)",
    rate_per_s=5.53,
    arrivals=lambda rate: Gamma(rate_per_s=rate, cv=1.09),
    # p50, p90 and p99 are the published ones; the others are chosen to meet the means 1154.7 and 211.1.
    input_lengths=QuantileGrid(
        {0: 2, 0.1: 280, 0.25: 395, 0.5: 1020, 0.75: 1150, 0.9: 2734, 0.99: 4142, 0.999: 5244, 1: 14_050}
    ),
    output_lengths=QuantileGrid({0: 7, 0.1: 45, 0.25: 70, 0.5: 129, 0.75: 370, 0.9: 424, 0.99: 601, 1: 1000}),
)

CODE = Preset(
    name="code",
    description="synthetic: like a code-completion service (Azure 2023 code: 2.57 requests/s, gap CV 13.15)",
    rate_per_s=2.57,
    # A Gamma of this CV would put three of four requests at the very instant of the one before.
    arrivals=lambda rate: Hyperexponential(rate_per_s=rate, cv=13.15),
    # Quantiles of the whole trace, whose service cut prompts at 7437 tokens.
    input_lengths=QuantileGrid(
        {
            0: 3,
            0.1: 147,
            0.25: 578,
            0.5: 1469,
            0.75: 2744,
            0.85: 3920,
            0.9: 5187,
            0.95: 7303,
            0.99: 7436,
            1: 7437,
        }
    ),
    output_lengths=QuantileGrid(
        {
            0: 6,
            0.1: 7,
            0.25: 9,
            0.5: 13,
            0.75: 24,
            0.85: 39,
            0.9: 55,
            0.95: 90,
            0.975: 145,
            0.99: 251,
            0.995: 359,
            0.999: 825,
            0.9997: 932,
            1: 1899,
        }
    ),
)

PRESETS = {preset.name: preset for preset in (CHAT, CODE)}


def build_preset(
    name: str, n: int | None = None, rate_per_s: float | None = None, seed: int = 0
) -> Synthetic:
    """The preset `name` with `n` requests at `rate_per_s`. An unknown name raises WorkloadError."""
    if name not in PRESETS:
        raise WorkloadError(f"preset {name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name].build(n=n, rate_per_s=rate_per_s, seed=seed)
