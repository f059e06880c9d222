"""Token tries: weights of tokens reduced to weights of every byte prefix.

`layout` describes a trie as arrays, `reductions` computes over it, and `trie` is the class
that users see; each remaining module adds one ability to it.
"""

from typing import TYPE_CHECKING

from genlm.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names that `lazy_exports` reads
    from genlm.core.trie.async_trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
    from genlm.core.trie.layout import TrieLayout as TrieLayout
    from genlm.core.trie.trie import TokenCharacterTrie as TokenCharacterTrie
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
