"""The `config.json` of a Hugging Face model folder: read with plain JSON, its text part, its context length."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servetwin.sim.context_limit import default_max_model_len, max_positions

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
"""How architectures name the number of positions."""


class ModelFolderError(ValueError):
    """A folder that is no model; the message names it and what is missing."""


@dataclass(frozen=True, slots=True)
class HFConfig:
    """One `config.json`."""

    path: Path
    data: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.resolve().parent.name

    @property
    def text(self) -> dict[str, Any]:
        """The language model's part: a multimodal wrapper keeps it under `text_config`."""
        nested = self.data.get("text_config")
        return nested if isinstance(nested, dict) else self.data

    def max_model_len(self, wanted: int | None) -> int:
        """Tokens of context: `wanted`, else the model's own by vLLM's rules.

        Raises ModelFolderError when there are fewer positions than wanted, and when neither says a number.
        """
        limit = next((self.text[key] for key in POSITION_KEYS if self.text.get(key)), None)
        if limit is None and wanted is not None:
            return wanted
        if not isinstance(limit, int) or limit < 1:
            raise ModelFolderError(f"{self.path}: max_position_embeddings is missing or no positive number")
        rope = self._rope()
        most = max_positions(limit, rope)
        if wanted is not None and wanted > most:
            raise ModelFolderError(
                f"max_model_len {wanted} is above the {most} positions that the model allows ({self.path.parent})"
            )
        return wanted or default_max_model_len(limit, rope)

    def _rope(self) -> dict[str, Any]:
        """The rope settings, in the new spelling or the old one, which keeps one of them beside the others."""
        rope = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        original = self.text.get("original_max_position_embeddings")
        return {"original_max_position_embeddings": original, **rope} if rope and original else rope


def read_hf_config(path: Path) -> HFConfig:
    """The configuration in a folder, or the file itself. Raises ModelFolderError."""
    file = path if path.is_file() else path / "config.json"
    try:
        data = json.loads(file.read_bytes())
    except OSError as e:
        raise ModelFolderError(f"{file}: {e.strerror or e} (a model is a local Hugging Face folder)") from e
    except ValueError as e:
        raise ModelFolderError(f"{file}: not JSON ({e})") from e
    if not isinstance(data, dict):
        raise ModelFolderError(f"{file}: must hold a JSON object, holds {type(data).__name__}")
    return HFConfig(file, data)
