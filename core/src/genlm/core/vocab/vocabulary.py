"""`Vocabulary`: a tokenizer with the exact bytes of each of its ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genlm.core.vocab.decoding import token_bytes, tokens_and_strings
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

    def __repr__(self) -> str:
        missing = f", {len(self.missing_ids)} of them without a token" * bool(self.missing_ids)
        return f"<Vocabulary of {type(self.tokenizer).__name__}: {self.size} ids{missing}>"

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Decode a tokenizer and note the ids that no token has.

        Args:
            tokenizer: Any that `decode_vocab` takes; kept, not copied.

        Raises:
            VocabularyError: Its tokens cannot be decoded to exact bytes.
        """
        found = token_bytes(tokenizer)
        byte_vocab, str_vocab = tokens_and_strings(found)
        missing = tuple(key for key in range(len(byte_vocab)) if key not in found)
        return cls(tokenizer, byte_vocab, str_vocab, missing)

    @property
    def size(self) -> int:
        """Number of ids, the length of every row."""
        return len(self.byte_vocab)
