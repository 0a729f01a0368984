"""The one number of a profile that may be fitted to a measured run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Calibration(BaseModel):
    """A factor that was fitted to one part of a run: of dense operators, or of whole steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    on: str
    """What it was fitted to."""
