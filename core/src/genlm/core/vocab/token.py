"""`Token`: the bytes of a vocabulary entry together with its id.

A vocabulary may have several tokens with equal bytes. They are distinct outcomes of the
model and therefore distinct here.
"""

from __future__ import annotations

from typing import Any

from genlm.core.base.validation import is_integer


class Token(bytes):
    """An entry of a vocabulary: a `bytes` object with a token id, which identifies it.

    Equality, hash and order are those of `token_id`, so tokens with equal bytes are distinct
    in sets and dictionaries, and a sorted vocabulary is in id order. All other operations
    (indexing, slicing, `startswith`, `+`) are those of `bytes` and return plain `bytes`. A
    token never equals a plain `bytes` object, and ordering the two raises `TypeError`;
    compare `token.byte_string` instead.

    Attributes:
        token_id: Position in the vocabulary.
        byte_string: The bytes as a plain `bytes` object.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        """Create a token.

        Raises:
            TypeError: `token_id` is not an integer, or `byte_string` is not bytes.
        """
        # bytes(3) would be three null bytes.
        if not isinstance(byte_string, (bytes, bytearray, memoryview)):
            raise TypeError(f"byte_string={byte_string!r}; expected bytes")
        if type(token_id) is not int and not is_integer(token_id):
            raise TypeError(f"token_id={token_id!r}; expected an integer")
        # Not super(), which is slower: vocabularies have one token for each id.
        self = bytes.__new__(cls, byte_string)
        self.token_id = token_id
        return self

    @property
    def byte_string(self) -> bytes:
        """The bytes as a plain `bytes` object, which compares by content."""
        return bytes(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Token):
            return self.token_id == other.token_id
        # After NotImplemented, Python would call bytes.__eq__, which compares the contents.
        if isinstance(other, bytes | bytearray | memoryview):
            return False
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        # Without this, Python would use bytes.__ne__.
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __lt__(self, other: bytes) -> bool:
        return self.token_id < _id_to_compare(other, "<")

    def __le__(self, other: bytes) -> bool:
        return self.token_id <= _id_to_compare(other, "<=")

    def __gt__(self, other: bytes) -> bool:
        return self.token_id > _id_to_compare(other, ">")

    def __ge__(self, other: bytes) -> bool:
        return self.token_id >= _id_to_compare(other, ">=")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.token_id, self.byte_string)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.token_id}, {self.byte_string!r})"

    __str__ = __repr__


def _id_to_compare(other: object, operator: str) -> int:
    """Return the id of `other`, which must be a `Token`."""
    if isinstance(other, Token):
        return other.token_id
    raise TypeError(
        f"{operator!r} between a Token and {type(other).__name__}: tokens are ordered by id; "
        f"compare token.byte_string for the order of bytes"
    )
