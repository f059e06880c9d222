"""Tokenizers written in Python: transformers' slow ones and remote code."""

from __future__ import annotations

from typing import Any

from genlm.core.errors import VocabularyError

__all__ = ["python_tokenizer_bytes"]


def python_tokenizer_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Derive the bytes of every id of a tokenizer without a Rust backend."""
    raise VocabularyError(f"{type(tokenizer).__name__} is of no known kind")
