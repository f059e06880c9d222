"""Token tries: from weights of tokens to weights of every byte prefix.

`layout` describes a trie as arrays, `segments` reduces weights over it, `trie` is the
class that users see; each remaining module adds one ability to it.
"""

from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.trie import TokenCharacterTrie

__all__ = ["TokenCharacterTrie", "TrieLayout"]
