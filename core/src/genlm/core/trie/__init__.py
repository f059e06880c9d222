"""Token tries: weights of tokens reduced to weights of every byte prefix.

`layout` describes a trie as arrays, `reductions` computes over it, and `trie` is the class
that users see; each remaining module adds one ability to it.
"""
