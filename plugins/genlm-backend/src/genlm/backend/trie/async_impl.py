"""Published class `AsyncTokenCharacterTrie`."""

from __future__ import annotations

from typing import Any

import genlm
from genlm.backend.trie.base import TokenCharacterTrie
from genlm.backend.trie.parallel import ParallelTokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie"]

_TRIES = {"sequential": TokenCharacterTrie, "parallel": ParallelTokenCharacterTrie}


class AsyncTokenCharacterTrie(genlm.AsyncTokenCharacterTrie):
    """Maps to `genlm.AsyncTokenCharacterTrie`, with the published tries.

    Args:
        trie: A `TokenCharacterTrie` or `ParallelTokenCharacterTrie`.
    """

    @classmethod
    def from_vocab(
        cls, vocab: Any, backend: str | None = "parallel", **kwargs: Any
    ) -> AsyncTokenCharacterTrie:
        """Build the trie of a vocabulary.

        Args:
            vocab: Tokens.
            backend: `"parallel"` or `"sequential"`.
            **kwargs: Further arguments of the trie's class.

        Raises:
            ValueError: The backend is unknown.
        """
        if backend not in _TRIES:
            raise ValueError(f"backend={backend!r}: expected one of {', '.join(_TRIES)}")
        return cls(_TRIES[backend](vocab, **kwargs))
