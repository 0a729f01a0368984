"""Rules of `compare --fail-on`: how much worse than A a figure of B may be.

p99_ttft:+5%                  fails when it rises by more than 5 % of A's value
mean_e2el:+10ms               ... by more than 10 ms (us, ms and s, for times)
request_throughput:-3%        fails when it falls by more than 3 %
preemptions:+0                fails when there is one more; a number alone is in the figure's own unit
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from servetwin.sim.comparison import Difference
from servetwin.sim.metric_names import TIME_UNITS_MS, MetricName, metric_name

GRAMMAR = "NAME:+N or NAME:-N with N a number and one of %, us, ms, s, or nothing for the figure's own unit"
ROUNDING = 1e-9
_LIMIT = re.compile(r"([+-])(\d+(?:\.\d*)?|\.\d+)\s*(%|us|ms|s)?")


@dataclass(frozen=True, slots=True)
class Threshold:
    """A figure may change by `limit` at most: upwards where the sign is +, downwards where it is -."""

    text: str
    name: MetricName
    sign: int
    limit: float
    """0 or more, in percent of A or in the unit of the figure."""
    percent: bool

    def judge(self, difference: Difference) -> Verdict:
        """Of the figure of that name. One that has no value in B, or none in A, fails: nothing says that it is good."""
        change = difference.delta_percent if self.percent else difference.delta
        interval = difference.interval_percent if self.percent else difference.interval
        if change is None and difference.delta is not None:
            # A's value is 0, of which nothing is a percentage: any rise is beyond every limit.
            return Verdict(self, difference.delta, None, difference.delta * self.sign > 0, None)
        if change is None:
            return Verdict(self, None, None, True, None)
        worst = None if interval is None else sorted(self.sign * end for end in interval)
        within = None if worst is None else (self._beyond(worst[0]), self._beyond(worst[1]))
        exceeded = self._beyond(change * self.sign)
        return Verdict(self, difference.delta, change if self.percent else None, exceeded, within)

    def _beyond(self, change: float) -> bool:
        """5 % more, computed from floats, is not more than 5 %."""
        return change > self.limit + ROUNDING * max(self.limit, 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a threshold."""

    threshold: Threshold
    delta: float | None
    delta_percent: float | None
    exceeded: bool
    ends_beyond: tuple[bool, bool] | None
    """Whether the better and the worse end of the interval of the change lie beyond the limit; None without one."""

    @property
    def interval_beyond(self) -> bool | None:
        """Whether the whole interval does."""
        return None if self.ends_beyond is None else self.ends_beyond[0]

    @property
    def words(self) -> str:
        name = self.threshold.text
        if self.delta is None:
            return f"{name}: FAILED, one of the runs has no value"
        change = (
            f"{self.delta_percent:+.3g} %"
            if self.delta_percent is not None
            else f"{self.delta:+.6g} {self.threshold.name.unit}"
        )
        return f"{name}: {'FAILED' if self.exceeded else 'kept'}, changed by {change} ({self._how_sure})"

    @property
    def _how_sure(self) -> str:
        if self.ends_beyond is None:
            return "there is no interval"
        if self.ends_beyond[0]:
            return "the whole interval lies beyond the limit"
        if self.ends_beyond[1]:
            return "the limit lies within the interval: either may be chance"
        return "the whole interval lies within the limit"

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.threshold.text,
            "metric": str(self.threshold.name),
            "delta": self.delta,
            "delta_percent": self.delta_percent,
            "exceeded": self.exceeded,
            "interval_beyond": self.interval_beyond,
        }


def threshold(text: str) -> Threshold:
    """Reads a rule; ValueError that says what is allowed."""
    name_text, colon, limit_text = text.partition(":")
    if not colon:
        raise ValueError(f"--fail-on {text!r}: must be {GRAMMAR}, for example p99_ttft:+5%")
    try:
        name = metric_name(name_text)
    except ValueError as e:
        raise ValueError(f"--fail-on {text!r}: {e}") from e
    match = _LIMIT.fullmatch(limit_text.strip())
    if match is None:
        raise ValueError(f"--fail-on {text!r}: {limit_text!r} is no limit: it must be {GRAMMAR}")
    sign, number, unit = 1 if match[1] == "+" else -1, float(match[2]), match[3]
    if unit in TIME_UNITS_MS:
        if name.unit not in TIME_UNITS_MS:
            raise ValueError(
                f"--fail-on {text!r}: {name} is in {name.unit}, not a time: use % or a number alone"
            )
        number *= TIME_UNITS_MS[unit] / TIME_UNITS_MS[name.unit]
    return Threshold(text, name, sign, number, unit == "%")
