"""Steps of like shape: what a measured step takes the next time, and so what no model of shapes could foretell.

Two steps are alike when they hold as many decode rows and as many prompts, and agree within some per cent in prompt
tokens and in the tokens that decode rows and prompts read. Rows of unequal length within such a group are part of the
spread; so is whatever the machine did besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.features import StepFeatures
from servetwin.sim.steptime.measured_steps import MeasuredSteps

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
EQUAL = ("decode_rows", "prefill_rows")
NEAR = ("prefill_tokens", "decode_context_tokens", "prefill_context_tokens")
WIDTH = 0.04
"""Relative width of the intervals that NEAR counts are sorted into."""
FEWEST = 5
"""Steps of a group whose median says something of each of them."""
IN_WORDS = (
    f"like steps hold as many decode rows and prompts, and prompt tokens and contexts within {100 * WIDTH:.0f} %; "
    f"{FEWEST} or more of them"
)


def medians_of_like(steps: MeasuredSteps, among: MeasuredSteps) -> Floats:
    """Per step of `steps` the median device time in us of those of `among` that are like it, [n]; NaN: too few."""
    of_groups = _groups(among.features).assign(us=among.device_us).groupby([*EQUAL, *NEAR])["us"]
    medians = of_groups.median()[of_groups.size() >= FEWEST]
    found = _groups(steps.features).join(medians, on=[*EQUAL, *NEAR])["us"]
    values: Floats = found.to_numpy(dtype=np.float64)
    return values


def _groups(features: StepFeatures) -> pd.DataFrame:
    """What steps must share to be alike, one row a step."""
    import pandas as pd

    near = {name: np.floor(np.log1p(getattr(features, name)) / np.log1p(WIDTH)) for name in NEAR}
    return pd.DataFrame({name: getattr(features, name) for name in EQUAL} | near)
