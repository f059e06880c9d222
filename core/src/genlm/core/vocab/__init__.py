"""Vocabularies: tokens as bytes, decoded exactly from tokenizers."""

from genlm.core.vocab.token import Token
from genlm.core.vocab.vocabulary import Vocabulary, decode_vocab

__all__ = ["Token", "Vocabulary", "decode_vocab"]
