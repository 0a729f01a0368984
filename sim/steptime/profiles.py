"""Step-time profiles: files of measured times that steps are foretold from, with what they were measured on.

A profile is one JSON file (`servetwin fit ... -o FILE`); a folder of per-kernel tables serves as one, too. Some are
shipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from servetwin.sim.config import explain
from servetwin.sim.steptime.calibration import Calibration
from servetwin.sim.steptime.kernel_model import KernelStepModel
from servetwin.sim.steptime.kernel_tables import ATTENTION_AXES, KernelTables, is_table_folder, read_tables
from servetwin.sim.steptime.kernel_times import KernelTimes
from servetwin.sim.steptime.shipped import shipped_profiles
from servetwin.sim.steptime.step_sources import is_step_folder
from servetwin.sim.steptime.steps_profile import StepsProfile
from servetwin.sim.steptime.tensor_parallel import TensorParallel

Columns = dict[str, list[float]]


class ProfileError(ValueError):
    """A file that is no profile, or a damaged one."""


class KernelProfile(BaseModel):
    """Times of single kernels, which a step is the sum of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    kind: Literal["kernels"] = "kernels"
    about: dict[str, Any]
    """Card, model, versions, date."""
    written: str | None = None
    """The day of the fit; None for a folder of tables."""
    attention: Columns
    dense: dict[str, Columns]
    per_sequence: dict[str, Columns]
    skew: Columns | None = None
    errors: list[dict[str, Any]] = []
    """Of rows left out (`table_check`)."""
    calibrated: Calibration | None = None
    """The factor of the dense operators."""

    @classmethod
    def of(cls, tables: KernelTables, errors: list[dict[str, Any]], written: str | None = None) -> Self:
        skew = None if tables.skew is None else tables.skew[["n", "ratio", "pc", "alpha"]]
        return cls(
            about=tables.about,
            written=written,
            attention=_columns(tables.attention[[*ATTENTION_AXES, "time_us"]]),
            dense={name: _columns(rows) for name, rows in tables.dense.items()},
            per_sequence={name: _columns(rows) for name, rows in tables.per_sequence.items()},
            skew=None if skew is None else _columns(skew),
            errors=errors,
        )

    @property
    def measured_cards(self) -> int:
        """Cards that shared the layers which were measured."""
        return int(self.about.get("tensor_parallel_size", 1))

    def step_model(
        self,
        num_layers: int,
        *,
        parallel: TensorParallel | None = None,
        capture_sizes: tuple[int, ...] = (),
    ) -> KernelStepModel:
        """For a model of so many layers, with the factor that was calibrated. Raises TableError.

        `parallel`: on several cards; `capture_sizes`: padded to these (see KernelStepModel).
        """
        return KernelStepModel(
            self.times() if parallel is None else KernelTimes.of(parallel.sharded(self.tables())),
            num_layers,
            dense_scale=1.0 if self.calibrated is None else self.calibrated.value,
            capture_sizes=capture_sizes,
            all_reduces=None if parallel is None else parallel.all_reduces(),
        )

    def times(self) -> KernelTimes:
        """As they were measured. Raises TableError."""
        return KernelTimes.of(self.tables())

    def tables(self) -> KernelTables:
        """What the profile was fitted to."""
        import pandas as pd

        return KernelTables(
            path="profile",
            attention=pd.DataFrame(self.attention),
            dense={name: pd.DataFrame(rows) for name, rows in self.dense.items()},
            per_sequence={name: pd.DataFrame(rows) for name, rows in self.per_sequence.items()},
            skew=None if self.skew is None else pd.DataFrame(self.skew),
            about=self.about,
        )


def _columns(rows: Any) -> Columns:
    return {str(name): np.asarray(rows[name], dtype=np.float64).tolist() for name in rows.columns}


Profile = KernelProfile | StepsProfile


class _KindOnly(BaseModel):
    kind: Literal["kernels", "steps"]


def load_profile(path: str | Path) -> Profile:
    """From a file, a folder of per-kernel tables, or by the name of a shipped one.

    Raises ProfileError, TableError, OSError.
    """
    path = Path(path)
    if not path.exists():
        path = shipped_profiles().get(str(path), path)
    if path.is_dir():
        if is_table_folder(path):
            return KernelProfile.of(read_tables(path), [])
        if is_step_folder(path):
            raise ProfileError(
                f"{path}: holds measured steps; `servetwin fit {path} -o FILE` makes a profile of them"
            )
        raise ProfileError(f"{path}: is a folder without attention.csv, and no profile of `servetwin fit`")
    if not path.is_file():
        raise ProfileError(
            f"{path}: no such file or folder, nor a shipped profile ({', '.join(shipped_profiles())})"
        )
    content = path.read_bytes()
    try:
        kind = _KindOnly.model_validate_json(content).kind
        return (StepsProfile if kind == "steps" else KernelProfile).model_validate_json(content)
    except ValidationError as e:
        raise ProfileError(f"{path}: is no profile of `servetwin fit`: {explain(e)}") from e


def write_profile(profile: Profile, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(profile.model_dump_json(), encoding="utf-8")
    partial.replace(path)
