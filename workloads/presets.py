"""Named synthetic workloads, shaped like published statistics of real services, or like a benchmark's defaults.

All data are made here; only the figures that a description names are others': Azure's LLM inference traces of 2023
(Microsoft, CC-BY 4.0), Mooncake's conversation trace (FAST25), 300 ShareGPT requests as LLMServingSim serves them,
ServeGen's deepseek-r1 clients, the agent traces of LMCache. Where they give rate, coefficient of variation of
the gaps, p50, p90 and p99 of lengths, a preset has them exactly, and their means within 5 %. Input and output are
drawn independently of each other (measured correlations are between -0.11 and 0.07).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from servetwin.workloads.arrivals import AllAtOnce, Arrivals, Gamma, Hyperexponential, Poisson
from servetwin.workloads.block_tree import BlockTree
from servetwin.workloads.checks import check_above_0
from servetwin.workloads.joint_lengths import Independent
from servetwin.workloads.lengths import Lognormal
from servetwin.workloads.observed_lengths import QuantileGrid
from servetwin.workloads.prompts import LengthsAndPrefixes, PromptModel
from servetwin.workloads.schedules import Diurnal
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.synthetic import Synthetic
from servetwin.workloads.vllm_arrivals import BenchServe
from servetwin.workloads.vllm_datasets import PrefixRepetitionDataset, RandomDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named synthetic workload."""

    name: str
    description: str
    """One line for people: begins with "synthetic:", then rate, CV of the gaps, lengths (p50/p90/p99), prefixes."""
    rate_per_s: float
    """Requests per second unless another rate is asked for."""
    arrivals: Callable[[float], Arrivals]
    """The arrival process at a given rate in requests per second."""
    prompts: PromptModel
    n: int = 1000
    """Requests unless another number is asked for."""

    def build(self, *, n: int | None = None, rate_per_s: float | None = None, seed: int = 0) -> Synthetic:
        """`n` requests; another rate squeezes or stretches the arrivals in time (a day stays a day).

        An infinite rate sends all at once. A bad number raises ArgumentError.
        """
        rate = self.rate_per_s if rate_per_s is None else rate_per_s
        check_above_0("rate_per_s", rate)
        arrivals = AllAtOnce() if math.isinf(rate) else self.arrivals(rate)
        workload = Synthetic(arrivals=arrivals, prompts=self.prompts, n=self.n if n is None else n, seed=seed)
        workload.about |= {"preset": self.name, "description": self.description}
        if math.isfinite(rate):
            workload.about["rate_per_s"] = rate
        return workload


_CHAT_LENGTHS = LengthsAndPrefixes(
    lengths=Independent(
        # p50, p90 and p99 are the published ones; the others are chosen to meet the means 1154.7 and 211.1.
        input_lengths=QuantileGrid(
            {0: 2, 0.1: 280, 0.25: 395, 0.5: 1020, 0.75: 1150, 0.9: 2734, 0.99: 4142, 0.999: 5244, 1: 14_050}
        ),
        output_lengths=QuantileGrid(
            {0: 7, 0.1: 45, 0.25: 70, 0.5: 129, 0.75: 370, 0.9: 424, 0.99: 601, 1: 1000}
        ),
    )
)

CHAT = Preset(
    name="chat",
    description=(
        "synthetic: like a conversation service (Azure 2023 conv): 5.53 requests/s, gap CV 1.09 (gamma), "
        "input 1020/2734/4142, output 129/424/601 tokens, no shared prefixes"
    ),
    rate_per_s=5.53,
    arrivals=lambda rate: Gamma(rate_per_s=rate, cv=1.09),
    prompts=_CHAT_LENGTHS,
)

CODE = Preset(
    name="code",
    description=(
        "synthetic: like a code-completion service (Azure 2023 code): 2.57 requests/s, gap CV 13.15 "
        "(hyperexponential), input 1469/5187/7436, output 13/55/251 tokens, no shared prefixes"
    ),
    rate_per_s=2.57,
    # A Gamma of this CV would put three of four requests at the very instant of the one before.
    arrivals=lambda rate: Hyperexponential(rate_per_s=rate, cv=13.15),
    prompts=LengthsAndPrefixes(
        lengths=Independent(
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
    ),
)

LONG_CONTEXT = Preset(
    name="long-context",
    description=(
        "synthetic: like long conversations (Mooncake): 3.40 requests/s, gap CV 1 (Poisson; its own 3.03 comes of "
        "ticks of 3 s), input 6909/27367/85400, output 350/597/1118 tokens, a tree of 512-token blocks whose first "
        "block all share and of which about 37 % have been seen before after 12,000 requests"
    ),
    rate_per_s=3.401,
    arrivals=lambda rate: Poisson(rate_per_s=rate),
    prompts=LengthsAndPrefixes(
        lengths=Independent(
            # p50, p90 and p99 are the published ones; the others are chosen to meet the means 12,035 and 342.6.
            input_lengths=QuantileGrid(
                {
                    0: 600,
                    0.1: 1000,
                    0.25: 2600,
                    0.5: 6909,
                    0.75: 13_000,
                    0.9: 27_367,
                    0.95: 40_000,
                    0.99: 85_400,
                    1: 126_000,
                }
            ),
            output_lengths=QuantileGrid(
                {0: 1, 0.1: 30, 0.25: 160, 0.5: 350, 0.75: 440, 0.9: 597, 0.99: 1118, 1: 2000}
            ),
        ),
        prefixes=BlockTree(fresh_weight=0.6, trunk_blocks=1),
    ),
)

SHAREGPT = Preset(
    name="sharegpt",
    description=(
        "synthetic: like ShareGPT questions (300 of them, as LLMServingSim serves them): 10.30 requests/s, gap CV 0.94 "
        "(gamma), input 731/1460/2765, output 632/770/784 tokens, no shared prefixes"
    ),
    rate_per_s=10.30,
    arrivals=lambda rate: Gamma(rate_per_s=rate, cv=0.94),
    prompts=LengthsAndPrefixes(
        lengths=Independent(
            # p50, p90 and p99 are the published ones, the others are a choice.
            input_lengths=QuantileGrid({0: 100, 0.25: 400, 0.5: 731, 0.9: 1460, 0.99: 2765, 1: 3500}),
            output_lengths=QuantileGrid({0: 100, 0.25: 450, 0.5: 632, 0.9: 770, 0.99: 784, 1: 800}),
        )
    ),
)

AGENT = Preset(
    name="agent",
    description=(
        "synthetic: calls of agents, without their sessions: 1.0 requests/s, gap CV 1 (Poisson), input 8000/24000, "
        "output 150/600 tokens (p50/p90; all of this a choice), a tree of 16-token blocks of which 75 to 90 % have "
        "been seen before after 1,000 requests (LMCache's agents: 81 to 94 %)"
    ),
    rate_per_s=1.0,
    arrivals=lambda rate: Poisson(rate_per_s=rate),
    prompts=LengthsAndPrefixes(
        lengths=Independent(
            input_lengths=Lognormal.from_quantiles(p50=8000, p90=24_000, min_tokens=1000, max_tokens=120_000),
            output_lengths=Lognormal.from_quantiles(p50=150, p90=600, max_tokens=4000),
        ),
        prefixes=BlockTree(fresh_weight=0.0025, trunk_blocks=50, block_tokens=16),
    ),
)

RANDOM = Preset(
    name="random",
    description=(
        "synthetic: the random dataset of vllm bench serve by its defaults: input 1024, output 128 tokens, no shared "
        "prefix; 4 requests/s (a choice), gap CV 1, rescaled to the exact rate"
    ),
    rate_per_s=4.0,
    arrivals=lambda rate: BenchServe(rate_per_s=rate),
    prompts=RandomDataset(),
)

PREFIX_REPETITION = Preset(
    name="prefix-repetition",
    description=(
        "synthetic: the prefix_repetition dataset of vllm bench serve by its defaults: input 512, of which 256 are one "
        "of 10 prefixes, output 128 tokens; 4 requests/s (a choice), gap CV 1, rescaled to the exact rate"
    ),
    rate_per_s=4.0,
    arrivals=lambda rate: BenchServe(rate_per_s=rate),
    prompts=PrefixRepetitionDataset(),
)

DIURNAL_CHAT = Preset(
    name="diurnal-chat",
    description=(
        "synthetic: a day of the preset chat: 0.25 requests/s on average (a choice), highest at 15 h, 9.9 times the "
        "lowest (ServeGen deepseek-r1: 42.5 to 4.3), Poisson at every moment (gap CV 1.57 over the day), "
        "input 1020/2734/4142, output 129/424/601 tokens, no shared prefixes"
    ),
    rate_per_s=0.25,
    arrivals=lambda rate: Diurnal.from_peak_to_trough(rate_per_s=rate, peak_to_trough=9.9, peak_hour=15.0),
    prompts=_CHAT_LENGTHS,
    n=21_600,
)

PRESETS = {
    preset.name: preset
    for preset in (CHAT, CODE, LONG_CONTEXT, SHAREGPT, AGENT, RANDOM, PREFIX_REPETITION, DIURNAL_CHAT)
}


def build_preset(
    name: str, n: int | None = None, rate_per_s: float | None = None, seed: int = 0
) -> Synthetic:
    """The preset `name` with `n` requests at `rate_per_s`. An unknown name raises WorkloadError."""
    if name not in PRESETS:
        raise WorkloadError(f"preset {name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name].build(n=n, rate_per_s=rate_per_s, seed=seed)
