"""Published class `TokenCharacterTrie`."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.backend.tokenization import Token
from genlm.backend.trie.views import TrieViews

__all__ = ["TokenCharacterTrie"]


class TokenCharacterTrie(TrieViews):
    """Maps to `genlm.TokenCharacterTrie`, with the published dtypes, mappings and edges.

    Results of `weight_sum` and the other reductions are float64, as published. The edge to the
    leaf of a token is `(None, token_id)`; see `leaf_label` for other items.

    Args:
        decode: Tokens, or other iterables of hashable symbols. Plain bytes raise a
            `DeprecationWarning`, since tokens with equal bytes cannot be distinguished.
        **options: Further options of `genlm.TokenCharacterTrie`.

    Raises:
        VocabularyError: As for `genlm.TokenCharacterTrie`; a `ValueError`.
    """

    _dtype: npt.DTypeLike = np.float64
    """Dtype of weights and results."""

    def __init__(self, decode: Any, **options: Any) -> None:
        try:
            super().__init__(decode, **options)
        finally:  # also if a duplicate item raises an error
            if any(map(Token.is_plain_bytes, getattr(self, "decode", ()))):
                warnings.warn(
                    "Passing plain bytes to TokenCharacterTrie is deprecated; pass Token "
                    "objects, as decode_vocab returns them",
                    DeprecationWarning,
                    stacklevel=2,
                )

    def reduce_rows(self, rows: Any, operation: Any) -> Any:
        """Reduce rows in the published dtype; see `genlm.TokenCharacterTrie.reduce_rows`."""
        return super().reduce_rows(_with_dtype(rows, self._dtype), operation)

    def leaf_label(self, leaf: int) -> Hashable:
        """Return the second element of the edge to a leaf in `children`.

        Returns:
            The id of a token, or the index in `decode` of another item. If a token with the
            same symbols has this id, the item itself.
        """
        item = self.decode[leaf]
        if isinstance(item, Token):
            return item.token_id
        siblings = [self.decode[index] for index in self.tokens_at(self.layout.parent[leaf])]
        token_ids = {token.token_id for token in siblings if isinstance(token, Token)}
        return item if leaf in token_ids else leaf


def _with_dtype(rows: Any, dtype: npt.DTypeLike) -> Any:
    """Convert rows of real numbers; other rows are returned, and the reduction refuses them."""
    if isinstance(rows, torch.Tensor):
        torch_dtype = torch.float64 if dtype == np.float64 else torch.float32
        return rows if rows.is_complex() else rows.to(torch_dtype)
    return rows.astype(dtype, copy=False) if rows.dtype.kind in "biuf" else rows
