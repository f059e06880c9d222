"""`ByteTokenizer`: token i is byte i, and token 256 is the end of text."""

from __future__ import annotations

from collections.abc import Iterable

from genlm.core.reference.ngram import END_OF_TEXT, SYMBOLS
from genlm.core.vocab import Token, Vocabulary

__all__ = ["END_OF_TEXT_BYTES", "ByteTokenizer", "byte_vocabulary"]

END_OF_TEXT_BYTES = b"<|endoftext|>"
"""How the end of text is written; `encode` never produces id 256 from it."""


class ByteTokenizer:
    """Text as UTF-8 bytes, one token a byte.

    Attributes:
        eos_token_id: Ends a text.
        bos_token_id: Begins a text; the same id, as in GPT-2.
        vocab_size: Number of ids.
    """

    eos_token_id = END_OF_TEXT
    bos_token_id = END_OF_TEXT
    vocab_size = SYMBOLS

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str | bytes) -> list[int]:
        """Return the bytes of `text`; no id is added before or after them."""
        return list(text.encode() if isinstance(text, str) else text)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD."""
        pieces = (
            END_OF_TEXT_BYTES if index == END_OF_TEXT else bytes((index,))
            for index in token_ids
        )
        return b"".join(pieces).decode(errors="replace")


def byte_vocabulary() -> Vocabulary:
    """Make the vocabulary of `ByteTokenizer`: 256 bytes and the end of text."""
    byte_vocab = [Token(index, bytes((index,))) for index in range(256)]
    byte_vocab.append(Token(END_OF_TEXT, END_OF_TEXT_BYTES))
    str_vocab = [
        chr(index) if 0x20 <= index < 0x7F else f"<0x{index:02X}>" for index in range(256)
    ]
    str_vocab.append(END_OF_TEXT_BYTES.decode())
    return Vocabulary(ByteTokenizer(), byte_vocab, str_vocab)
