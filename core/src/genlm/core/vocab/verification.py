"""Checking derived bytes against the tokenizer's own decoding, every id at once.

Each token is placed between two copies of a plain token. Pieces of a character are
completed with single-byte tokens where the vocabulary has them, so that even they
are compared byte for byte and not as replacement characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from genlm.core.errors import VocabularyError

__all__ = ["check_decoding"]

Decode = Callable[[list[int]], str]

# A lead byte for the one to three continuation bytes that a token starts with.
_LEADS = (b"", b"\xc2", b"\xe1", b"\xf1")
# What can complete a character; after E0 and F0 not every continuation may follow.
_TAILS = (b"", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80")


def check_decoding(bytes_by_id: Mapping[int, bytes], decode: Decode, tokenizer: object) -> None:
    """Make sure that `decode` agrees with the bytes of every token.

    Args:
        bytes_by_id: What each token is believed to add in mid-text.
        decode: The tokenizer's decoding of ids, special tokens included.
        tokenizer: Named in the error.

    Raises:
        VocabularyError: They disagree; the message shows the first such token.
    """
    plain = _plain_token(bytes_by_id)
    if plain is None:
        return
    spelling = {value[0]: key for key, value in bytes_by_id.items() if len(value) == 1}
    contexts = [_context(key, value, spelling) for key, value in bytes_by_id.items()]
    if _agree(contexts, plain, bytes_by_id, decode):
        return
    while len(contexts) > 1:
        half = contexts[: len(contexts) // 2]
        rest = contexts[len(contexts) // 2 :]
        contexts = rest if _agree(half, plain, bytes_by_id, decode) else half
    context = contexts[0]
    shown = [plain, *context, plain]
    raise VocabularyError(
        f"{type(tokenizer).__name__} decodes the ids {shown} as {decode(shown)!r}, "
        f"but by its decoder their bytes are {[bytes_by_id[key] for key in shown]}; its "
        f"decoding is not known here, so no bytes were derived. Use a tokenizer that "
        f"decodes token by token, or report its class"
    )


def _agree(
    contexts: Iterable[Sequence[int]],
    plain: int,
    bytes_by_id: Mapping[int, bytes],
    decode: Decode,
) -> bool:
    """Whether decoding the contexts, a plain token between any two, gives their bytes."""
    middle = [plain]
    for context in contexts:
        middle.extend(context)
        middle.append(plain)
    expected = b"".join([bytes_by_id[key] for key in middle]).decode(errors="replace")
    decoded = decode([plain, *middle, plain])
    # The outer plain tokens absorb what happens at the ends of a text (a space
    # stripped, a prefix kept), which changes their length by a few characters.
    slack = len(decoded) - len(expected)
    return 0 <= slack <= 2 * len(bytes_by_id[plain]) + 4 and any(
        decoded.startswith(expected, start) for start in range(slack + 1)
    )


def _plain_token(bytes_by_id: Mapping[int, bytes]) -> int | None:
    """A short token of ASCII letters, otherwise any text, otherwise none."""
    texts = [
        (not value.strip().isalpha(), len(value), key)
        for key, value in bytes_by_id.items()
        if value.isascii() and value.strip()
    ]
    if texts:
        return min(texts)[2]
    return next((key for key, value in bytes_by_id.items() if _is_text(value)), None)


def _context(token_id: int, value: bytes, spelling: Mapping[int, int]) -> list[int]:
    """The token among single-byte tokens that complete its first and last characters."""
    if _is_text(value):
        return [token_id]
    continuations = 0
    while value[continuations : continuations + 1] and value[continuations] & 0xC0 == 0x80:
        continuations += 1
    if continuations >= len(_LEADS):
        return [token_id]
    lead = _LEADS[continuations]
    for tail in _TAILS:
        if _is_text(lead + value + tail) and all(byte in spelling for byte in lead + tail):
            return [
                *map(spelling.__getitem__, lead),
                token_id,
                *map(spelling.__getitem__, tail),
            ]
    return [token_id]


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
