"""What every configuration is: frozen, and strict about the names of its fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
