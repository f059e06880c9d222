"""`TokenCharacterTrie` as published."""

from __future__ import annotations

import warnings
from typing import Any

import genlm
from genlm.backend.tokenization import Token

__all__ = ["TokenCharacterTrie"]


class TokenCharacterTrie(genlm.TokenCharacterTrie):
    """Maps to `genlm.TokenCharacterTrie`, with the published and older spellings.

    Args:
        decode: Tokens, or other iterables of hashable letters. Plain bytes work, with a
            `DeprecationWarning`: tokens that share bytes could not be told apart.
        **options: Further ones of `genlm.TokenCharacterTrie`.

    Raises:
        VocabularyError: As `genlm.TokenCharacterTrie`; a `ValueError`.
    """

    def __init__(self, decode: Any, **options: Any) -> None:
        super().__init__(decode, **options)
        if any(map(Token.is_plain_bytes, self.decode)):
            warnings.warn(
                "a TokenCharacterTrie of plain bytes is deprecated; pass Token objects, as "
                "decode_vocab returns them",
                DeprecationWarning,
                stacklevel=2,
            )

    def mass_sum(self, ws: Any) -> Any:
        """Older name of `weight_sum`, with a `DeprecationWarning`."""
        _warn_of_mass_sum("mass_sum", "weight_sum")
        return self.weight_sum(ws)

    def batch_mass_sum(self, ws: Any) -> Any:
        """Older name of `batch_weight_sum`, with a `DeprecationWarning`."""
        _warn_of_mass_sum("batch_mass_sum", "batch_weight_sum")
        return self.batch_weight_sum(ws)


def _warn_of_mass_sum(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)
