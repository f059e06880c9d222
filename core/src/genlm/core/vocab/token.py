"""`Token`: the bytes of a vocabulary entry together with its id.

A vocabulary may hold several tokens with the same bytes; they are different
outcomes of the model and stay apart here.
"""

from __future__ import annotations

__all__ = ["Token"]


class Token(bytes):
    """A vocabulary entry: its bytes, identified by its id.

    Equality, hash and order are those of `token_id`, so tokens that share bytes
    stay apart in sets and dictionaries and a sorted vocabulary is in id order.
    Everything else (indexing, slicing, `startswith`, `+`) is that of `bytes` and
    gives plain `bytes`. A token never equals a plain `bytes` object; compare
    `token.byte_string` for that.

    Attributes:
        token_id: Position in the vocabulary.
        byte_string: The bytes as a plain `bytes` object.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        self = super().__new__(cls, byte_string)
        self.token_id = token_id
        return self
