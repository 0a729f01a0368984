"""The model's forward pass as one graph of torch.compile, for batches of every size.

The graph holds the custom operators of `attention.py` as they are: the compiler does not look into them, and the
tensor that joins them keeps their order. Batch size and number of logits rows are symbols of the graph. A size of 1
would be compiled for itself (it broadcasts), so smaller batches are padded with tokens that write no K/V.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch.nn.functional import pad

from servetwin.executor import kv_cache
from servetwin.executor.attention_metadata import AttentionMetadata
from servetwin.executor.forward_context import ForwardContext
from servetwin.executor.input_batch import PADDING_SLOT
from servetwin.executor.model_loader import LoadedModel
from servetwin.executor.packed_model import PackedModel

log = logging.getLogger(__name__)

MIN_SIZE = 2
TRACE_TOKENS, TRACE_LOGITS = 7, 3
"""Sizes of the batch that is traced. They differ, or the tracer would take them for the same symbol."""

Backend = str | Callable[..., Any]


class CompileError(ValueError):
    """A model, or a machine, on which `compile` is not possible; the message says why."""


def compile_model(loaded: LoadedModel, *, backend: Backend = "inductor") -> PackedModel:
    """Compiles the forward pass of `loaded`. Takes from seconds to minutes; nothing is compiled later.

    `backend` is torch.compile's. Raises CompileError without a C++ compiler (inductor on a CPU needs one) and for
    a model that does not compile as one graph.
    """
    if backend == "inductor" and loaded.device.type == "cpu":
        _check_compiler()
    log.info("compiling the model with torch.compile: from some ten seconds to minutes")
    return CompiledModel(loaded, backend)


def _check_compiler() -> None:
    compiler = os.environ.get("CXX") or "g++"
    # inductor takes $CXX for one word.
    if shutil.which(compiler) is None:
        raise CompileError(
            f"compile needs a C++ compiler, and {compiler!r} is not on the PATH: install g++, or name a compiler, "
            "without options, in the environment variable CXX"
        )


class CompiledModel(PackedModel):
    """A `PackedModel` whose graph was compiled when it was made."""

    def __init__(self, loaded: LoadedModel, backend: Backend) -> None:
        super().__init__(loaded.model)
        self._compiled: Any = torch.compile(super()._logits, fullgraph=True, backend=backend)
        try:
            self._trace(loaded)
        except BackendCompilerFailed as e:
            raise CompileError(f"compile: no code was generated: {_first_line(e.inner_exception)}") from e
        except TorchDynamoException as e:
            model_type = loaded.model.config.model_type
            raise CompileError(
                f"compile: model_type {model_type!r} is not one graph: {_first_line(e)}"
            ) from e

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, context: ForwardContext
    ) -> Tensor:
        """As `PackedModel.forward`."""
        metadata = context.attention_metadata
        padded = replace(metadata, slot_mapping=_padded(metadata.slot_mapping, PADDING_SLOT))
        logits = super().forward(
            _padded(input_ids),
            _padded(positions),
            _padded(logits_indices),
            replace(context, attention_metadata=padded),
        )
        return logits[: len(logits_indices)]

    def _logits(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor) -> Tensor:
        logits: Tensor = self._compiled(input_ids, positions, logits_indices)
        return logits

    def _trace(self, loaded: LoadedModel) -> None:
        """Compiles with a batch of one request that writes nothing."""
        positions = torch.arange(TRACE_TOKENS, device=loaded.device)
        input_ids, logits_indices = torch.zeros_like(positions), positions[:TRACE_LOGITS].clone()
        for tensor in (input_ids, positions, logits_indices):
            # Unlike dynamic=True this leaves numbers of the model alone, and a size that is fixed all the same
            # is an error.
            dynamo.mark_dynamic(tensor, 0)
        index = positions.to(torch.int32)
        metadata = AttentionMetadata(
            query_start_loc=index[:2] * TRACE_TOKENS,
            seq_lens=index[1:2] * TRACE_TOKENS,
            block_table=index[:1].unsqueeze(0),
            slot_mapping=torch.full_like(positions, PADDING_SLOT),
        )
        caches = kv_cache.allocate(loaded.kv_cache_spec, 1, TRACE_TOKENS, loaded.device)
        self.forward(input_ids, positions, logits_indices, ForwardContext(metadata, caches))


def _padded(tensor: Tensor, value: int = 0) -> Tensor:
    """At least `MIN_SIZE` elements; the tensor itself when it has them."""
    missing = MIN_SIZE - len(tensor)
    if missing <= 0:
        return tensor
    # A tensor made in inference mode is of another kind than those that were traced, and would be compiled for anew.
    with torch.inference_mode(False):
        return pad(tensor, (0, missing), value=value)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
