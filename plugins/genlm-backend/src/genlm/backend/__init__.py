"""The published interface of genlm-backend 0.3, served by the genlm core.

Programs written for that package run unchanged; `docs/migrating.md` says what each name
maps to in `genlm`, which is where new programs should start. A namespace portion: the
package `genlm` itself belongs to genlm-core.
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
