"""How long the steps of a leap take, and how many of them fit before something happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt


@dataclass(slots=True)
class LeapTimes:
    """Like steps one after the other: the first takes `first_ns` from its start to the next one's, device and all."""

    first_ns: int
    growth_ns: int = 0
    """By which each takes longer than the one before."""
    each_ns: Sequence[int] = ()
    """How long each takes, where that is no even growth."""

    def duration_ns(self, num_steps: int) -> int:
        """Of so many steps."""
        if self.each_ns:
            return sum(self.each_ns[:num_steps])
        return even_duration_ns(self.first_ns, self.growth_ns, num_steps)

    def steps_until(self, time_ns: int, most: int) -> int:
        """The least number of steps, at most `most`, that take `time_ns` (> 0) or longer."""
        if self.each_ns:
            for steps, ns in enumerate(accumulate(self.each_ns[:most]), start=1):
                if ns >= time_ns:
                    return steps
            return most
        return even_steps_until(self.first_ns, self.growth_ns, time_ns, most)


def even_duration_ns(first_ns: int, growth_ns: int, num_steps: int) -> int:
    """Of steps each of which takes so much longer than the one before."""
    return num_steps * first_ns + growth_ns * (num_steps * (num_steps - 1) // 2)


def even_steps_until(first_ns: int, growth_ns: int, time_ns: int, most: int) -> int:
    """The least number of them, at most `most`, that take `time_ns` (> 0) or longer."""
    # Steps do not get shorter, so this many are enough.
    steps = min(-(-time_ns // first_ns), most)
    if growth_ns and even_duration_ns(first_ns, growth_ns, steps) >= time_ns:
        # n (2 first - growth) + n n growth >= 2 time: the root, rounded down, and on from there.
        linear = 2 * first_ns - growth_ns
        root = (isqrt(linear * linear + 8 * growth_ns * time_ns) - linear) // (2 * growth_ns)
        steps = min(max(root, 1), most)
        while steps < most and even_duration_ns(first_ns, growth_ns, steps) < time_ns:
            steps += 1
    return steps
