"""Single logits of a batch, addressed by row and token id, for rules that touch few tokens of few rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)
RowTokens = tuple[int, npt.ArrayLike]
"""The number of a row, and token ids within the vocabulary."""


def flat_index(parts: Sequence[RowTokens], vocab_size: int) -> npt.NDArray[np.int64]:
    """Places of all these tokens in `logits.view(-1)`, in the order given. `parts` is not empty."""
    return np.concatenate([row * vocab_size + np.asarray(ids, dtype=np.int64) for row, ids in parts])


def float32_like(logits: torch.Tensor, values: npt.ArrayLike) -> torch.Tensor:
    """Settings that are to be combined with logits: float32, on their device.

    Settings are finite doubles; what is beyond float32 becomes its largest number, since an infinite one would make
    NaN of -inf.
    """
    return torch.from_numpy(np.clip(values, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)).to(logits.device)
