"""Models of known shapes with random weights, as runners of the product's executor; needs transformers.

Imported by the parts that need it only: where transformers is missing, those parts are left out by name.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.session import Session
from servetwin.executor.cuda_graphs import CudaGraphCapture, ReplayedCall, capture_sizes
from servetwin.executor.eager_model import eager_model
from servetwin.executor.kv_cache import blocks_in
from servetwin.executor.model_loader import load_model
from servetwin.executor.model_runner import ModelRunner

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 40_000
CACHE_SHARE = 0.75
"""Of the memory that the weights leave free."""
VALUE_STD = 32.0
"""Of the cached values: their mean over a context must weigh something beside the rest of a layer, or else reading
those of another request would hardly show.
"""

_LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_TOY: dict[str, Any] = _LLAMA_8B | {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "float32",
}
CONFIGS = {"Llama-3.1-8B": _LLAMA_8B, "Qwen3-0.6B": _QWEN3_06B}
TOY_CONFIGS = {"toy Llama": _TOY}


@dataclass(frozen=True)
class Served:
    """A model ready to run steps."""

    runner: ModelRunner
    weight_bytes: int
    """That a decode step reads: all but the rows of the input embedding, unless it is the output's matrix, too."""
    max_num_batched_tokens: int

    def capture(self, session: Session) -> tuple[int, ...]:
        """Decode batches run from graphs of these sizes from now on; on a CPU from their stand-in."""
        states = self.runner.states
        sizes = capture_sizes(states.max_num_seqs, self.max_num_batched_tokens)
        self.runner.capture_decode_graphs(sizes, CudaGraphCapture() if session.is_gpu else ReplayedCall())
        return sizes

    def kv_bytes(self, tokens: int) -> int:
        """Of keys and values of all layers."""
        return tokens * self.runner.loaded.kv_cache_spec.bytes_per_token


def serve(session: Session, name: str) -> Served:
    """The model of that name, with a cache that takes most of the free memory, full of random numbers."""
    config = (TOY_CONFIGS if session.toy else CONFIGS)[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        loaded = load_model(
            Path(folder), load_format="dummy", device=session.device, max_model_len=_max_len(session)
        )
    weight_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
    if not config["tie_word_embeddings"]:
        embedding: Any = loaded.model.get_input_embeddings()
        weight_bytes -= embedding.weight.nbytes
    model = eager_model(loaded)
    cache_bytes = int(session.free_bytes() * CACHE_SHARE)
    runner = ModelRunner(
        loaded,
        num_blocks=blocks_in(cache_bytes, loaded.kv_cache_spec, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=8 if session.toy else MAX_NUM_SEQS,
        max_model_len=loaded.max_model_len,
        model=model,
    )
    generator = session.generator(0)
    for cache in runner.kv_caches:
        cache.key.normal_(generator=generator)
        cache.value.normal_(std=VALUE_STD, generator=generator)
    return Served(runner, weight_bytes, 64 if session.toy else 8192)


def _max_len(session: Session) -> int:
    return 256 if session.toy else MAX_MODEL_LEN
