"""A model's forward pass over one packed batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from servetwin.executor.forward_context import ForwardContext, set_forward_context


class PackedModel:
    """transformers' model (with our attention inside), called with packed tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, context: ForwardContext
    ) -> Tensor:
        """Writes the batch's K/V into the caches of `context` and gives logits `[num_logits, vocab_size]`.

        input_ids, positions  [num_tokens] int64, the tokens of all requests one after the other
        logits_indices        [num_logits] int64, the packed tokens whose successor is wanted
        """
        with set_forward_context(context):
            return self._logits(input_ids, positions, logits_indices)

    def _logits(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor) -> Tensor:
        output = self._model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: Tensor = output.logits.squeeze(0)
        return logits
