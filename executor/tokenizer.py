"""The tokenizer of a model folder, where it has one. Everything but text works without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as FastTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, from local files only; None when there is none. ValueError when damaged."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    # Imported here: it takes seconds, and a front end without a tokenizer does without.
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as e:
        raise ValueError(f"cannot read the tokenizer in {str(folder)!r}: {e}") from e
    return tokenizer


def fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> FastTokenizer:
    """What does the work inside a fast tokenizer. ValueError for one of another kind, by name."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__} of {tokenizer.name_or_path!r} is not a fast one (package "
            "tokenizers), which text that comes token by token needs: add its tokenizer.json"
        )
    backend: FastTokenizer = tokenizer.backend_tokenizer
    return backend


def token_text(tokenizer: FastTokenizer, token_id: int) -> str:
    """The text of one token on its own, special ones included."""
    return tokenizer.decode([token_id], skip_special_tokens=False)
