"""`special_ids`: which ids of a tokenizer stand for no text, such as the end of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["special_ids"]

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def special_ids(tokenizer: Any, size: int) -> frozenset[int]:
    """Return the ids of the special tokens of a tokenizer.

    Args:
        tokenizer: A tokenizer of transformers, `tokenizers`, `sentencepiece` or `tiktoken`, or
            any object with attributes such as `eos_token_id`.
        size: Number of ids; larger ones are left out.
    """
    return frozenset(each for each in _found(tokenizer, size) if 0 <= each < size)


def _found(tokenizer: Any, size: int) -> Iterator[int]:
    for name in _NAMES:
        value = getattr(tokenizer, f"{name}_token_id", None)
        if isinstance(value, int):
            yield value
    yield from getattr(tokenizer, "all_special_ids", ())
    # Reserved tokens of a model family are often added as special without having a role.
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    yield from (key for key, token in (added or {}).items() if token.special)
    if hasattr(tokenizer, "decode_single_token_bytes"):  # tiktoken
        yield from map(tokenizer.encode_single_token, tokenizer.special_tokens_set)
    if hasattr(tokenizer, "get_piece_size"):  # sentencepiece
        pieces = range(min(size, tokenizer.get_piece_size()))
        yield from (i for i in pieces if tokenizer.is_control(i) or tokenizer.is_unknown(i))
