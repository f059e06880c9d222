"""Checking derived bytes against the tokenizer's own decoding, every id at once.

Each token is placed between two copies of a plain token. Pieces of a character are
completed with single-byte tokens where the vocabulary has them, so that even they
are compared byte for byte and not as replacement characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from genlm.core.errors import VocabularyError

__all__ = ["check_added", "check_decoding", "is_text"]

Decode = Callable[[list[int]], str]

Context = tuple[tuple[int, ...], bytes]
"""Ids that are decoded together, and the bytes they should give."""

_PLAIN_LENGTH = 8  # no vocabulary of text is without a shorter token
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
    contexts = [
        ((key,), value) if value.isascii() else _context(key, value, spelling)
        for key, value in bytes_by_id.items()
    ]
    try:
        if _agree(contexts, plain, decode):
            return
        while len(contexts) > 1:
            half = contexts[: len(contexts) // 2]
            rest = contexts[len(contexts) // 2 :]
            contexts = rest if _agree(half, plain, decode) else half
        ids, expected = contexts[0]
        shown = [*plain[0], *ids, *plain[0]]
        decoded = decode(shown)
    except Exception as error:
        raise VocabularyError(
            f"{type(tokenizer).__name__} raised {error!r} when it was asked to decode all of "
            f"its ids; repair its decoding or its vocabulary"
        ) from error
    raise VocabularyError(
        f"{type(tokenizer).__name__} decodes the ids {shown} as {decoded!r}, but by "
        f"its decoder that should be {expected!r} between two {plain[1]!r}; its decoding is "
        f"not known here, so no bytes were derived. Use a tokenizer that decodes token by "
        f"token, or report its class"
    )


def check_added(
    encode: Callable[[str], list[int]], token_id: int, content: str, tokenizer: object
) -> None:
    """Make sure that the content of an added token is read as that token.

    Raises:
        VocabularyError: It is not, so nothing says that the content is its text.
    """
    found = encode(content)
    if found != [token_id]:
        raise VocabularyError(
            f"{type(tokenizer).__name__} has the added token {content!r} (id {token_id}), "
            f"which it neither decodes to that text nor reads from it (it reads {found}); "
            f"remove the token or give it a content that the tokenizer keeps"
        )


def _agree(contexts: Sequence[Context], plain: Context, decode: Decode) -> bool:
    """Whether decoding the contexts, a plain token between any two, gives their bytes."""
    between, separator = plain
    ids = [*between, *between]
    for context, _ in contexts:
        ids += context
        ids += between
    ids += between
    parts = separator.join([value for _, value in contexts])
    expected = (separator + parts + separator).decode(errors="replace")
    decoded = decode(ids)
    # What happens at the ends of a text (a space stripped, a prefix kept) shows in
    # three plain tokens, of which only the middle one is sure to give its bytes.
    three, middle = decode([*between, *between, *between]), separator.decode()
    return any(
        decoded == three[:start] + expected + three[start + len(middle) :]
        for start in range(len(three))
        if three.startswith(middle, start)
    )


def _plain_token(bytes_by_id: Mapping[int, bytes]) -> Context | None:
    """A short token of ASCII letters, otherwise any text, otherwise none.

    Byte pieces will not do, for a run of them is decoded together: so two letters
    are better than one, and of single letters the last, as byte pieces come first.
    """
    texts = [
        (not value.strip().isalpha(), len(value) == 1, len(value), -key)
        for key, value in bytes_by_id.items()
        if len(value) < _PLAIN_LENGTH and value.isascii() and value.strip()
    ]
    if texts:
        chosen = -min(texts)[3]
        return (chosen,), bytes_by_id[chosen]
    others = ((key, value) for key, value in bytes_by_id.items() if value and is_text(value))
    return next((((key,), value) for key, value in others), None)


def _context(token_id: int, value: bytes, spelling: Mapping[int, int]) -> Context:
    """The token among single-byte tokens that complete its first and last characters."""
    if is_text(value):
        return (token_id,), value
    continuations = 0
    while continuations < len(value) and value[continuations] & 0xC0 == 0x80:
        continuations += 1
    if continuations >= len(_LEADS):
        return (token_id,), value
    lead = _LEADS[continuations]
    for tail in _TAILS:
        whole = lead + value + tail
        if is_text(whole) and all(byte in spelling for byte in lead + tail):
            before, after = ([spelling[byte] for byte in part] for part in (lead, tail))
            return (*before, token_id, *after), whole
    return (token_id,), value


def is_text(value: bytes) -> bool:
    """Whether the bytes are UTF-8 on their own."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
