"""Token tries: weights of tokens reduced to weights of every byte prefix.

`layout` describes a trie as arrays, `reductions` computes over it, and `trie` is the class
that users see; each remaining module adds one ability to it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genlm.core.trie.async_trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
    from genlm.core.trie.layout import TrieLayout as TrieLayout
    from genlm.core.trie.trie import TokenCharacterTrie as TokenCharacterTrie

# Imported on first use: the registry imports `plugin` in this package, without numpy.
_HOME = {
    "AsyncTokenCharacterTrie": "async_trie",
    "TokenCharacterTrie": "trie",
    "TrieLayout": "layout",
}

__all__ = ["AsyncTokenCharacterTrie", "TokenCharacterTrie", "TrieLayout"]


if not TYPE_CHECKING:  # as in `genlm`

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
