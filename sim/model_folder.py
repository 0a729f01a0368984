"""What scheduling needs to know of a model, read from its Hugging Face folder without torch."""

from __future__ import annotations

from pathlib import Path

from servetwin.sim.config import ModelConfig
from servetwin.sim.hf_config import ModelFolderError, read_hf_config

__all__ = ["ModelFolderError", "read_model_config"]


def read_model_config(folder: Path, max_model_len: int | None = None) -> ModelConfig:
    """ModelConfig from `config.json`; `max_model_len` may lower the model's own limit, not raise it."""
    config = read_hf_config(folder)
    length = config.max_model_len(max_model_len)
    vocab_size = config.text.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelFolderError(f"{config.path}: vocab_size is missing or no positive number")
    eos = config.text.get("eos_token_id")
    eos_ids = [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]
    return ModelConfig(
        name=config.name,
        max_model_len=length,
        vocab_size=vocab_size,
        eos_token_id=eos_ids[0] if eos_ids else None,
        extra_eos_token_ids=tuple(eos_ids[1:]),
    )
