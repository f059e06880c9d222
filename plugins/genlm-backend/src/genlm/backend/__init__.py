"""The published interface of genlm-backend 0.3, served by the genlm core.

Programs written for that package run unchanged. New programs should use the names of `genlm`,
to which `docs/migrating.md` maps the published ones. This is a portion of a namespace package;
genlm-core provides the package `genlm` itself.
"""

from genlm.backend.llm import AsyncTransformer, AsyncVirtualLM, load_model_by_name
from genlm.backend.tokenization import Token, decode_vocab
from genlm.backend.trie import (
    AsyncTokenCharacterTrie,
    ParallelTokenCharacterTrie,
    TokenCharacterTrie,
)

__all__ = [
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "ParallelTokenCharacterTrie",
    "Token",
    "TokenCharacterTrie",
    "decode_vocab",
    "load_model_by_name",
]
