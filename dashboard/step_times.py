"""Step times of a run against those that a profile foretells for the same shapes of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from servetwin.dashboard.run_columns import Numbers
from servetwin.dashboard.run_data import RunData, Window
from servetwin.dashboard.step_view import first_steps
from servetwin.sim.columns import SHAPE_COLUMNS
from servetwin.sim.contract import StepShape
from servetwin.sim.steptime.errors import Errors
from servetwin.sim.steptime.features import REGIMES, StepFeatures, StepModel, regimes_of

if TYPE_CHECKING:
    import pandas as pd

READ = (
    "start_s", "prepare_s", "device_s", "predicted_outside", "prefill_tokens", "decode_tokens", "rows", "decode_rows",
    *SHAPE_COLUMNS,
)  # fmt: skip
AS_LOGGED = "predicted_s"
STEPS_AT_MOST = 40_000
"""Of a window that are compared."""
CHUNK = 4_000
"""Steps that a model is asked for at once: it may need much memory for each."""


@dataclass(frozen=True)
class StepTimes:
    """n steps with tokens, in order."""

    start_s: Numbers
    device_ms: Numbers
    outside: Numbers
    """Whether the source of the run's own step times said that the step lies beyond what it was measured on."""
    logged_ms: Numbers
    """What was foretold for each when it ran; NaN where nothing was."""
    features: StepFeatures
    left_out: int
    """Steps of the window behind the ones read."""

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def regimes(self) -> Numbers:
        """prefill, decode or mixed, [n]."""
        return regimes_of(self.features)

    @property
    def new_tokens(self) -> Numbers:
        return self.features.new_tokens


def step_times(data: RunData, window: Window) -> StepTimes:
    """Steps of the window that have tokens and whose shape was noted (versions that did not note it: none)."""
    frame, left_out = first_steps(data.columns, *window, [*READ, AS_LOGGED], STEPS_AT_MOST)
    frame = frame[(frame.device_s > 0) & frame[[*SHAPE_COLUMNS]].notna().all(axis=1)]
    frame = frame.assign(new_tokens=frame.prefill_tokens + frame.decode_tokens)
    return StepTimes(
        start_s=frame.start_s.to_numpy(),
        device_ms=frame.device_s.to_numpy() * 1e3,
        outside=np.nan_to_num(frame.predicted_outside.to_numpy(dtype=np.float64)) > 0,
        logged_ms=frame[AS_LOGGED].to_numpy(dtype=np.float64) * 1e3,
        features=StepFeatures(**{name: frame[name].to_numpy(dtype=np.int64) for name in StepShape._fields}),
        left_out=left_out,
    )


@dataclass(frozen=True)
class Foretold:
    """Times for the same steps from another source."""

    device_ms: Numbers
    outside: Numbers
    """Which steps lie beyond what it was measured on."""

    def residual_percent(self, times: StepTimes) -> Numbers:
        """Foretold against the run's own time; above 0 where too long a time was foretold."""
        return 100 * (self.device_ms / times.device_ms - 1)


def foretell(model: StepModel, times: StepTimes) -> Foretold:
    """Times on the device by a step model."""
    durations, outside = [np.zeros(0)], [np.zeros(0, dtype=bool)]
    place = np.arange(len(times))
    for begin in range(0, len(times), CHUNK):
        some = times.features.where((begin <= place) & (place < begin + CHUNK))
        durations.append(model.durations_ns(some) / 1e6)
        says = getattr(model, "outside", None)
        outside.append(np.zeros(len(some), dtype=bool) if says is None else says(some))
    return Foretold(np.concatenate(durations), np.concatenate(outside))


def by_regime(times: StepTimes) -> pd.DataFrame:
    """The run's own times: steps, mean, median, P99 in ms, and how many lie outside."""
    import pandas as pd

    rows = {}
    for regime in (*REGIMES, "all"):
        mine = np.ones(len(times), dtype=bool) if regime == "all" else times.regimes == regime
        own = times.device_ms[mine]
        if len(own):
            median, p99 = np.percentile(own, (50, 99))
            rows[regime] = [len(own), own.mean(), median, p99, int(times.outside[mine].sum())]
    columns = ["steps", "mean (ms)", "median (ms)", "P99 (ms)", "outside the measured region"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def errors(times: StepTimes, foretold: Foretold) -> pd.DataFrame:
    """Errors of what was foretold in percent of the run's own times, by regime, and of the steps inside and outside."""
    import pandas as pd

    groups = {regime: times.regimes == regime for regime in REGIMES}
    groups |= {"all": np.ones(len(times), dtype=bool)}
    groups |= {"inside the measured region": ~foretold.outside, "outside": foretold.outside}
    found = {
        name: Errors.of(foretold.device_ms[mine], times.device_ms[mine]) for name, mine in groups.items()
    }
    rows = {name: [e.n, e.mape, e.median, e.p90, e.p99, e.bias] for name, e in found.items() if e is not None}
    columns = ["steps", "mean error (%)", "median (%)", "P90 (%)", "P99 (%)", "bias (%)"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def coverage(times: StepTimes, measured: dict[str, list[int]]) -> pd.DataFrame:
    """What the profile was measured on against what this run has, per quantity of a step."""
    import pandas as pd

    rows = {}
    for name, (low, high) in measured.items():
        if not hasattr(times.features, name) or not len(times):
            continue
        mine = getattr(times.features, name)
        rows[name] = [low, high, int(mine.min()), int(mine.max())]
    columns = ["measured from", "measured to", "this run from", "this run to"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)
