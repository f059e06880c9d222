"""`TokenCharacterTrie` as published."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import genlm
from genlm.backend.tokenization import Token

__all__ = ["TokenCharacterTrie"]


class TokenCharacterTrie(genlm.TokenCharacterTrie):
    """Maps to `genlm.TokenCharacterTrie`, with the published dtypes and edges.

    Results of `weight_sum` and the other reductions are float64, as published. The edge to a
    token's leaf is `(None, token_id)`; see `leaf_label` for other items.

    Args:
        decode: Tokens, or other iterables of hashable symbols. Plain bytes work, with a
            `DeprecationWarning`: tokens that share bytes could not be told apart.
        **options: Further ones of `genlm.TokenCharacterTrie`.

    Raises:
        VocabularyError: As `genlm.TokenCharacterTrie`; a `ValueError`.
    """

    _dtype: npt.DTypeLike = np.float64
    """Of weights and results."""

    def __init__(self, decode: Any, **options: Any) -> None:
        try:
            super().__init__(decode, **options)
        finally:  # before the error for a word that occurs twice
            if any(map(Token.is_plain_bytes, getattr(self, "decode", ()))):
                warnings.warn(
                    "Passing plain bytes to TokenCharacterTrie is deprecated; pass Token "
                    "objects, as decode_vocab returns them",
                    DeprecationWarning,
                    stacklevel=2,
                )

    def reduce(self, ws: Any, operation: Any, *, batch: bool, returns: Any) -> Any:
        """Reduce weights of the published dtype; see `genlm.TokenCharacterTrie.reduce`."""
        if isinstance(ws, list):
            ws = [_with_dtype(row, self._dtype) for row in ws]
        else:
            ws = _with_dtype(ws, self._dtype)
        return super().reduce(ws, operation, batch=batch, returns=returns)

    def leaf_label(self, leaf: int) -> Hashable:
        """Return what the edge to a leaf carries in `children`, beside None.

        Returns:
            The id of a token; the position in `decode` of another item. If a token with
            the same symbols has this id, the item itself.
        """
        item = self.decode[leaf]
        if isinstance(item, Token):
            return item.token_id
        beside = [self.decode[other] for other in self.tokens_at(self.layout.parent[leaf])]
        taken = {other.token_id for other in beside if isinstance(other, Token)}
        return item if leaf in taken else leaf


def _with_dtype(ws: Any, dtype: npt.DTypeLike) -> Any:
    """Convert floats of a tensor or array; anything else is returned unchanged."""
    if isinstance(ws, torch.Tensor):
        torch_dtype = torch.float64 if dtype == np.float64 else torch.float32
        return ws.to(torch_dtype) if ws.is_floating_point() else ws
    is_float = isinstance(ws, np.ndarray) and ws.dtype.kind == "f"
    return ws.astype(dtype, copy=False) if is_float else ws
