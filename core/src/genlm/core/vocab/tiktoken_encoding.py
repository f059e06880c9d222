"""Encodings of the `tiktoken` library."""

from __future__ import annotations

from typing import Any

__all__ = ["tiktoken_bytes"]


def tiktoken_bytes(encoding: Any) -> dict[int, bytes]:
    """Read the bytes of every id that a `tiktoken.Encoding` has.

    Special tokens are their text as UTF-8. Ids of the holes that encodings have
    between mergeable and special tokens are left out.
    """
    found: dict[int, bytes] = {}
    for token_id in range(encoding.n_vocab):
        try:
            found[token_id] = encoding.decode_single_token_bytes(token_id)
        except KeyError:
            continue
    return found
