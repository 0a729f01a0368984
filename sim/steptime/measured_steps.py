"""Measured whole steps: their shapes and their times, from the points of a profile or the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.columns import SHAPE_COLUMNS
from servetwin.sim.contract import StepShape
from servetwin.sim.steptime.features import Bools, StepFeatures

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
US_PER_S = 1e6


@dataclass(frozen=True)
class MeasuredSteps:
    """n steps, times in us."""

    features: StepFeatures
    device_us: Floats
    """Forward and sampling, [n]."""
    prepare_us: Floats
    """Host time of the worker before it, [n]."""

    @classmethod
    def of_points(cls, rows: Sequence[dict[str, Any]]) -> MeasuredSteps:
        """From the rows of a profile (`executor/profile_grid.py` says what is in them)."""
        shapes = [_shape(row["kind"], row["query_lens"], row["context_lens"]) for row in rows]
        device, prepare = (
            np.array([row[name] for row in rows], dtype=np.float64) for name in ("device_us", "prepare_us")
        )
        return cls(StepFeatures.of(shapes), device, prepare)

    @classmethod
    def of_run(cls, steps: pd.DataFrame) -> MeasuredSteps:
        """From the table steps/ of a run. Left out: empty steps, and those of versions that did not note shapes."""
        # Nulls are NaN in a frame of floats.
        steps = steps[(steps["device_s"] > 0) & steps[[*SHAPE_COLUMNS]].notna().all(axis=1)]
        steps = steps.assign(new_tokens=steps["prefill_tokens"] + steps["decode_tokens"])
        columns = {name: steps[name].to_numpy(dtype=np.int64) for name in StepShape._fields}
        device, prepare = (
            steps[name].to_numpy(dtype=np.float64) * US_PER_S for name in ("device_s", "prepare_s")
        )
        return cls(StepFeatures(**columns), device, prepare)

    def __len__(self) -> int:
        return len(self.device_us)

    def where(self, chosen: Bools) -> MeasuredSteps:
        """Some of them."""
        return MeasuredSteps(self.features.where(chosen), self.device_us[chosen], self.prepare_us[chosen])


def joined(parts: Sequence[MeasuredSteps]) -> MeasuredSteps:
    """All of them, in order."""
    names = StepShape._fields
    features = StepFeatures(*(np.concatenate([getattr(p.features, name) for p in parts]) for name in names))
    device, prepare = (np.concatenate([getattr(p, n) for p in parts]) for n in ("device_us", "prepare_us"))
    return MeasuredSteps(features, device, prepare)


def _shape(kind: str, query_lens: Sequence[int], context_lens: Sequence[int]) -> StepShape:
    """Rows of one token are decode rows, but in a step of chunks alone. Every row samples, and none is new."""
    query = np.asarray(query_lens, dtype=np.int64)
    read = query + np.asarray(context_lens, dtype=np.int64)
    decode = (query == 1) & (kind != "prefill")
    chunks, chunks_read = query[~decode], read[~decode]
    largest = max(zip(chunks.tolist(), chunks_read.tolist(), strict=True), default=(0, 0))
    return StepShape(
        new_tokens=int(query.sum()),
        rows=len(query),
        logits_rows=len(query),
        decode_rows=int(decode.sum()),
        decode_context_tokens=int(read[decode].sum()),
        decode_context_max_tokens=int(read[decode].max(initial=0)),
        prefill_tokens=int(chunks.sum()),
        prefill_rows=len(chunks),
        prefill_pairs=int((chunks * chunks_read).sum()),
        prefill_context_tokens=int(chunks_read.sum()),
        largest_chunk_tokens=largest[0],
        largest_chunk_context_tokens=largest[1],
        new_requests=0,
    )
