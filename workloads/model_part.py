"""The base of everything a fitted model's file holds: named fields, checked when they are read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
MAX_LISTED = 100_000
"""Numbers that one list of a model file may hold."""


class Part(BaseModel):
    """A part of a model: unknown fields, texts in the place of numbers and numbers that are none are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
