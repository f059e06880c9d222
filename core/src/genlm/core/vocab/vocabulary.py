"""`Vocabulary`: a tokenizer with the exact bytes of each of its ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genlm.core.vocab.token import Token

__all__ = ["Vocabulary"]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens that an engine's rows are indexed by.

    Attributes:
        tokenizer: The engine's own tokenizer object.
        byte_vocab: One `Token` per id, `byte_vocab[i].token_id == i`.
        str_vocab: One readable string per id, for display only.
        missing_ids: Ids below `size` that no token has, ascending. Their entry in
            `byte_vocab` is empty and their probability is 0 in every row.
    """

    tokenizer: Any
    byte_vocab: list[Token]
    str_vocab: list[str]
    missing_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ids, the length of every row."""
        return len(self.byte_vocab)
