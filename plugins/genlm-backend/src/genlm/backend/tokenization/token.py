"""Published class `Token`: the core's token, equal to plain bytes of the same content."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import genlm

__all__ = ["Token", "published_tokens"]


class _AnyToken(type):
    """Metaclass with which `isinstance(x, Token)` accepts the core's tokens."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is Token:
            return isinstance(instance, genlm.Token)
        return super().__instancecheck__(instance)


def _by_id_or_content(compare: Callable[[int, int], bool]) -> Any:
    """Return a method that compares tokens by id, and plain bytes by content."""

    def method(token: Token, other: object) -> bool:
        if isinstance(other, genlm.Token):
            return compare(token.token_id, other.token_id)
        return NotImplemented  # type: ignore[no-any-return]  # `bytes` compares the contents

    return method


class Token(genlm.Token, metaclass=_AnyToken):
    """Maps to `genlm.Token`; a token also equals plain bytes of its content.

    Tokens are compared with tokens by id and with plain bytes by content. The hash is that of
    the id, so do not use tokens and plain bytes as keys of one dictionary.

    Args:
        token_id: Index in the vocabulary.
        byte_string: Bytes of the token.

    Raises:
        TypeError: The id is not an integer, or the bytes are not `bytes`.
    """

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        """Create a token."""
        if not isinstance(token_id, int) or not isinstance(byte_string, bytes):
            raise TypeError(
                f"Token(token_id={token_id!r}, byte_string={byte_string!r}): expected an int "
                f"and bytes"
            )
        self = bytes.__new__(cls, byte_string)
        self.token_id = token_id
        return self

    @staticmethod
    def as_bytes(x: Any) -> Any:
        """Return the plain bytes of a token, and any other object unchanged."""
        return x.byte_string if isinstance(x, genlm.Token) else x

    @staticmethod
    def is_plain_bytes(x: Any) -> bool:
        """Whether `x` is bytes and not a token."""
        return isinstance(x, bytes) and not isinstance(x, genlm.Token)

    __eq__ = _by_id_or_content(operator.eq)
    __ne__ = _by_id_or_content(operator.ne)
    __lt__ = _by_id_or_content(operator.lt)
    __le__ = _by_id_or_content(operator.le)
    __gt__ = _by_id_or_content(operator.gt)
    __ge__ = _by_id_or_content(operator.ge)
    __hash__ = genlm.Token.__hash__

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={self.byte_string!r})"


def published_tokens(tokens: Iterable[genlm.Token]) -> list[Token]:
    """Convert the core's tokens to published tokens."""
    return [Token(token.token_id, token.byte_string) for token in tokens]
