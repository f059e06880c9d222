"""Texts of the reference engine: its tokenizer, and its training documents.

Token i is byte i, and token 256 is the end of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources

from genlm.core.reference.ngram import END_OF_TEXT, SYMBOLS
from genlm.core.vocab import Token, Vocabulary

END_OF_TEXT_BYTES = b"<|endoftext|>"
"""Text of the end-of-text token; `encode` never returns id 256 for it."""

_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")


class ByteTokenizer:
    """Tokenizer with one token for each UTF-8 byte of a text.

    Attributes:
        eos_token_id: Id that ends a text.
        bos_token_id: Id that begins a text; the same id, as in GPT-2.
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
    """Return the vocabulary of `ByteTokenizer`: 256 bytes and the end of text."""
    byte_vocab = [Token(index, bytes((index,))) for index in range(256)]
    byte_vocab.append(Token(END_OF_TEXT, END_OF_TEXT_BYTES))
    str_vocab = [
        chr(index) if 0x20 <= index < 0x7F else f"<0x{index:02X}>" for index in range(256)
    ]
    str_vocab.append(END_OF_TEXT_BYTES.decode())
    return Vocabulary(ByteTokenizer(), byte_vocab, str_vocab)


def split_documents(text: str | bytes) -> list[bytes]:
    """Split a text into its paragraphs, separated by blank lines: each is a document.

    Line ends within a paragraph remain; white space around paragraphs is removed.

    Returns:
        The documents in their order, as UTF-8 bytes; no document is empty.
    """
    data = text.encode() if isinstance(text, str) else text
    paragraphs = (paragraph.strip() for paragraph in _BLANK_LINES.split(data))
    return [paragraph for paragraph in paragraphs if paragraph]


def default_text() -> bytes:
    """Read the text in the package, which has one paragraph per line."""
    return resources.files(__package__).joinpath("default.txt").read_bytes()
