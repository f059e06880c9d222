"""The decoders of the `tokenizers` library, applied to single tokens in mid-text.

The input is the decoder's JSON state. Each step of the library is either implemented exactly
or refused: steps that depend on adjacent tokens (CTC, a pattern that could span two tokens)
do not define bytes for each token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Piece = str | bytes
"""A token between two steps: text, or bytes after a step that produces bytes."""

# The byte alphabet of GPT-2 (`bytes_to_unicode`): printable Latin-1 characters stand for their
# bytes, the characters from U+0100 on for the 68 other bytes.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
# Latin-1 characters outside the alphabet become U+FFFF, which Latin-1 cannot encode.
_BYTE_OF_CHARACTER = dict.fromkeys(_UNPRINTABLE, 0xFFFF) | {
    0x100 + position: byte for position, byte in enumerate(_UNPRINTABLE)
}

# As the library: six characters, of which Rust's u8::from_str_radix parses two.
_BYTE_FALLBACK = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")

# In the library's order, which matters, and with its spelling of " do not".
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_UNTIDY = re.compile("|".join(re.escape(untidy) for untidy, _ in _CLEANUP))


class UnknownStepError(ValueError):
    """A decoder step that does not define bytes for each token; the message names it."""


class DecoderChain:
    """The bytes that each token adds between two others, by the decoder's rules.

    Args:
        state: The decoder as the library serialises it. None if there is no decoder: the
            library then joins tokens with spaces, so each token adds a space before itself.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        self._maps: list[Callable[[str], Piece]] = []
        self._fused = False
        self._byte_step: str | None = None
        for step in [{"type": None}] if state is None else _flatten(state):
            self._append(step)

    def decode(self, tokens: Iterable[str]) -> list[bytes]:
        """Decode each token as if it were between two others."""
        pieces: list[Piece] = list(tokens)
        for function in self._maps:
            # Every step processes all tokens, because one call decodes a whole vocabulary.
            pieces = [function(piece) if isinstance(piece, str) else piece for piece in pieces]
        return [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def _append(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "Fuse":
            self._fused = True
        elif kind == "Strip":
            self._append_strip(step)
        elif kind in ("ByteLevel", "ByteFallback"):
            self._require_separate_tokens(kind)
            self._byte_step = kind
            self._fused = self._fused or kind == "ByteLevel"
            self._maps.append(_byte_level if kind == "ByteLevel" else _byte_fallback)
        elif kind in ("Replace", "Metaspace"):
            self._append_replacement(step)
        elif kind in ("BPEDecoder", "WordPiece", None):
            self._require_separate_tokens(kind)
            self._maps.append(_WORD_STEPS[kind](step))
        else:
            raise UnknownStepError(f"unknown decoder step {kind!r}")

    def _append_strip(self, step: Mapping[str, Any]) -> None:
        # After Fuse, only the ends of the whole text are stripped.
        if self._fused:
            return
        self._require_separate_tokens("Strip")
        content, start, stop = step["content"], step["start"], step["stop"]
        self._maps.append(lambda token: _strip(token, content, start, stop))

    def _append_replacement(self, step: Mapping[str, Any]) -> None:
        if step["type"] == "Metaspace":
            pattern, content = step["replacement"], " "
        elif "String" in step["pattern"]:
            pattern, content = step["pattern"]["String"], step["content"]
        else:
            raise UnknownStepError(f"decoder step Replace with the pattern {step['pattern']}")
        # A single character cannot span two tokens, and after ByteFallback a byte token cannot
        # be a character outside ASCII. ByteLevel has already converted everything to bytes.
        is_separate = not self._fused and self._byte_step is None
        is_single = len(pattern) == 1 and (self._byte_step is None or not pattern.isascii())
        if not (is_separate or is_single) or not pattern or self._byte_step == "ByteLevel":
            raise UnknownStepError(
                f"decoder step {step['type']} of {pattern!r} after tokens were joined"
            )
        self._maps.append(lambda token: token.replace(pattern, content))

    def _require_separate_tokens(self, kind: str | None) -> None:
        if self._fused or self._byte_step is not None:
            raise UnknownStepError(f"decoder step {kind!r} after tokens were joined")


def _flatten(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state["type"] == "Sequence":
        return [step for part in state["decoders"] for step in _flatten(part)]
    return [state]


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token that is written in GPT-2's byte alphabet.

    Raises:
        UnicodeEncodeError: A character is outside the alphabet.
    """
    return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")


def _byte_level(token: str) -> bytes:
    try:
        return byte_level_bytes(token)
    except UnicodeEncodeError:
        return token.encode()


def _byte_fallback(token: str) -> Piece:
    match = _BYTE_FALLBACK.fullmatch(token) if token.startswith("<0x") else None
    return bytes([int(match[1], 16)]) if match else token


def _strip(token: str, content: str, start: int, stop: int) -> str:
    stripped = _lstrip(token, content, start)
    return _lstrip(stripped[::-1], content, stop)[::-1]


def _lstrip(token: str, content: str, limit: int) -> str:
    width = len(token) - len(token.lstrip(content))
    return token[min(width, limit) :]


def _word_piece(step: Mapping[str, Any]) -> Callable[[str], str]:
    prefix, cleanup = step["prefix"], step["cleanup"]

    def decode(token: str) -> str:
        text = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        if cleanup and _UNTIDY.search(text):
            for untidy, tidy in _CLEANUP:
                text = text.replace(untidy, tidy)
        return text

    return decode


def _end_of_word(step: Mapping[str, Any]) -> Callable[[str], str]:
    suffix = step["suffix"]
    return lambda token: token.replace(suffix, " ") if suffix else token


def _space_before(_: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda token: f" {token}"


_WORD_STEPS: dict[str | None, Callable[[Mapping[str, Any]], Callable[[str], str]]] = {
    "BPEDecoder": _end_of_word,
    "WordPiece": _word_piece,
    None: _space_before,
}
