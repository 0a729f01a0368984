"""What attention needs to know about one packed batch; the same for every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Describes `num_tokens` packed query tokens of `num_reqs` requests. All tensors lie on the device."""

    query_start_loc: torch.Tensor
    """[num_reqs + 1] int32: first query token of each request, then the end."""
    seq_lens: torch.Tensor
    """[num_reqs] int32: context of each request, this step's tokens included."""
    block_table: torch.Tensor
    """[num_reqs, max_blocks] int32, unused entries 0."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64: where each token's K/V is written; -1 writes nothing."""
