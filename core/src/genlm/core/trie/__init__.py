"""Token tries: weights of tokens reduced to weights of every byte prefix.

`layout` describes a trie as arrays, `reductions` computes over it, and `trie` has the public
class; each of the other modules adds one ability to it.
"""
