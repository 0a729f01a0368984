"""The tokenizer of a model folder, where it has one. Everything but text works without."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, from local files only; None when there is none. ValueError when damaged."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as e:
        raise ValueError(f"cannot read the tokenizer in {str(folder)!r}: {e}") from e
    return tokenizer
