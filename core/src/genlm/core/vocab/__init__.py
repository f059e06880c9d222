"""Vocabularies: tokens as bytes, and exact decoding of tokenizers."""

from genlm.core.vocab.decoding import decode_vocab
from genlm.core.vocab.token import Token
from genlm.core.vocab.vocabulary import Vocabulary

__all__ = ["Token", "Vocabulary", "decode_vocab"]
