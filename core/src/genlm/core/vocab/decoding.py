"""Exact bytes of every id of a tokenizer."""

from __future__ import annotations

from typing import Any

from genlm.core.vocab.token import Token


def decode_vocab(tokenizer: Any) -> tuple[list[Token], list[str]]:
    raise NotImplementedError
