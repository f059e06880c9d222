"""Comparison of derived bytes with the decoding of the tokenizer, for every id.

All tokens are decoded in one sequence, each between two copies of a plain token. A token that
is part of a character is completed with single-byte tokens if the vocabulary has them, so that
its bytes are compared instead of replacement characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from genlm.core.base.errors import VocabularyError

Decode = Callable[[list[int]], str]

Context = tuple[tuple[int, ...], bytes]
"""Ids that are decoded together, and the expected bytes."""

_PLAIN_LENGTH = 8  # every vocabulary of text has a shorter token
_CONTINUATIONS = bytes(range(0x80, 0xC0))
# Lead bytes for the up to three continuation bytes that a token starts with.
_LEADS = (b"", b"\xc2", b"\xe1", b"\xf1")
# Bytes that complete a character; E0 and F0 do not allow every continuation byte.
_TAILS = (b"", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80")


def check_decoding(bytes_by_id: Mapping[int, bytes], decode: Decode, tokenizer: object) -> None:
    """Check that `decode` agrees with the bytes of every token.

    Args:
        bytes_by_id: The bytes that each token should add in mid-text.
        decode: The tokenizer's decoding of ids, special tokens included.
        tokenizer: The tokenizer, for error messages.
    """
    plain = _plain_token(bytes_by_id)
    if plain is None:
        return
    spelling = {value[0]: key for key, value in bytes_by_id.items() if len(value) == 1}
    contexts = [
        ((key,), value) if value.isascii() else _context(key, value, spelling)
        for key, value in bytes_by_id.items()
    ]
    try:
        if _agree(contexts, plain, decode):
            return
        while len(contexts) > 1:
            first_half = contexts[: len(contexts) // 2]
            second_half = contexts[len(contexts) // 2 :]
            contexts = second_half if _agree(first_half, plain, decode) else first_half
        ids, expected = contexts[0]
        sequence = [*plain[0], *ids, *plain[0]]
        decoded = decode(sequence)
    except Exception as error:
        raise VocabularyError(
            f"{type(tokenizer).__name__} raised {error!r} while it decoded all of its ids; "
            f"repair its decoding or its vocabulary"
        ) from error
    raise VocabularyError(
        f"{type(tokenizer).__name__} decodes the ids {sequence} as {decoded!r}; its "
        f"decoder should give {expected!r} between two {plain[1]!r}. This way of decoding is "
        f"not supported, so no bytes were derived. Use a tokenizer that decodes token by "
        f"token, or report its class"
    )


def check_added(
    encode: Callable[[str], list[int]], token_id: int, content: str, tokenizer: object
) -> None:
    """Check that the content of an added token is encoded to that token."""
    ids = encode(content)
    if ids != [token_id]:
        raise VocabularyError(
            f"{type(tokenizer).__name__} has the added token {content!r} (id {token_id}), "
            f"which it neither decodes to that text nor encodes from it (it encodes {ids}); "
            f"remove the token or change its content to one that the tokenizer keeps"
        )


def _agree(contexts: Sequence[Context], plain: Context, decode: Decode) -> bool:
    """Whether the contexts, separated by a plain token, decode to their bytes."""
    between, separator = plain
    ids = [*between, *between]
    for context, _ in contexts:
        ids += context
        ids += between
    ids += between
    parts = separator.join([value for _, value in contexts])
    expected = (separator + parts + separator).decode(errors="replace")
    decoded = decode(ids)
    # Three plain tokens show how the ends of a text are decoded (a space stripped, a prefix
    # kept); only the middle one is certain to decode to its bytes.
    three, middle = decode([*between, *between, *between]), separator.decode()
    return any(
        decoded == three[:start] + expected + three[start + len(middle) :]
        for start in range(len(three))
        if three.startswith(middle, start)
    )


def _plain_token(bytes_by_id: Mapping[int, bytes]) -> Context | None:
    """Return a short token of ASCII letters, or any token that is text, or None.

    A run of byte pieces is decoded together, so byte pieces are unsuitable: tokens of two
    letters are preferred, then the last single letter, because byte pieces come first.
    """
    texts = [
        (not value.strip().isalpha(), len(value) == 1, len(value), -key)
        for key, value in bytes_by_id.items()
        if len(value) < _PLAIN_LENGTH and value.isascii() and value.strip()
    ]
    if texts:
        token_id = -min(texts)[3]
        return (token_id,), bytes_by_id[token_id]
    any_text = ((key, value) for key, value in bytes_by_id.items() if value and is_text(value))
    return next((((key,), value) for key, value in any_text), None)


def _context(token_id: int, value: bytes, spelling: Mapping[int, int]) -> Context:
    """Return a token with single-byte tokens that complete its first and last characters."""
    continuations = len(value) - len(value.lstrip(_CONTINUATIONS))
    lead = _LEADS[min(continuations, len(_LEADS) - 1)]
    for tail in _TAILS:
        whole = lead + value + tail
        if is_text(whole) and all(byte in spelling for byte in lead + tail):
            before, after = ([spelling[byte] for byte in part] for part in (lead, tail))
            return (*before, token_id, *after), whole
    return (token_id,), value


def is_text(value: bytes) -> bool:
    """Whether the bytes are valid UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
