"""What scheduling needs to know of a model, read from its Hugging Face folder without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from servetwin.sim.config import ModelConfig
from servetwin.sim.context_limit import default_max_model_len, max_positions


class ModelFolderError(ValueError):
    """A folder that is no model; the message names it and what is missing."""


def read_model_config(folder: Path, max_model_len: int | None = None) -> ModelConfig:
    """ModelConfig from `config.json`; `max_model_len` may lower the model's own limit, not raise it."""
    data = _read(folder / "config.json")
    text = data.get("text_config", data)
    limit = text.get("max_position_embeddings") or text.get("n_positions") or text.get("max_sequence_length")
    if not isinstance(limit, int) or limit < 1:
        raise ModelFolderError(
            f"{folder / 'config.json'}: max_position_embeddings is missing or no positive number"
        )
    rope = _rope(text)
    most = max_positions(limit, rope)
    if max_model_len is not None and max_model_len > most:
        raise ModelFolderError(
            f"max_model_len {max_model_len} is above the {most} positions that the model allows ({folder})"
        )
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelFolderError(f"{folder / 'config.json'}: vocab_size is missing or no positive number")
    eos = text.get("eos_token_id")
    eos_ids = [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]
    return ModelConfig(
        name=folder.resolve().name,
        max_model_len=max_model_len or default_max_model_len(limit, rope),
        vocab_size=vocab_size,
        eos_token_id=eos_ids[0] if eos_ids else None,
        extra_eos_token_ids=tuple(eos_ids[1:]),
    )


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """The rope settings, in the new spelling or the old one, which keeps one of them beside the others."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original = text.get("original_max_position_embeddings")
    return {"original_max_position_embeddings": original, **rope} if rope and original else rope


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as e:
        raise ModelFolderError(f"{path}: {e.strerror or e} (a model is a local Hugging Face folder)") from e
    except ValueError as e:
        raise ModelFolderError(f"{path}: not JSON ({e})") from e
    if not isinstance(data, dict):
        raise ModelFolderError(f"{path}: must hold a JSON object, holds {type(data).__name__}")
    return data
