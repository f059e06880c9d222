"""Token tries: from weights of tokens to weights of every byte prefix.

`layout` describes a trie as arrays, `segments` reduces weights over it, `trie` is the
class that users see; each remaining module adds one ability to it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genlm.core.trie.async_trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
    from genlm.core.trie.layout import TrieLayout as TrieLayout
    from genlm.core.trie.protocol import TokenTrie as TokenTrie
    from genlm.core.trie.trie import TokenCharacterTrie as TokenCharacterTrie

# Imported on first use: the registry reads `plugin` in this package, without numpy.
_HOME = {
    "AsyncTokenCharacterTrie": "async_trie",
    "TokenCharacterTrie": "trie",
    "TokenTrie": "protocol",
    "TrieLayout": "layout",
}

__all__ = ["AsyncTokenCharacterTrie", "TokenCharacterTrie", "TokenTrie", "TrieLayout"]


if not TYPE_CHECKING:  # as in `genlm`

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
