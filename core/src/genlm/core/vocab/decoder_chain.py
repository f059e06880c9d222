"""What a decoder of the `tokenizers` library makes of one token in mid-text.

Works on the decoder's JSON state and knows neither tokenizers nor ids. Every step
of the library is either modelled exactly or refused: steps that look at a token's
neighbours (CTC, a pattern that could span two tokens) have no bytes per token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from genlm.core.vocab.byte_alphabet import bytes_from_characters

__all__ = ["DecoderChain", "UnknownStepError"]

Piece = str | bytes
"""A token on its way through the chain: text, or bytes once a step has made them."""

# The library's own test: six bytes, and what Rust's u8::from_str_radix reads.
_BYTE_FALLBACK = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")

# In the library's order, which matters; " do not" is indeed its spelling.
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
    """A decoder step that gives a token no bytes of its own; the message says which."""


class DecoderChain:
    """The bytes that each token adds between two others, by the decoder's own rules.

    Args:
        state: The decoder as the library serialises it, None for no decoder: the
            library then joins tokens with spaces, so each adds one before itself.

    Raises:
        UnknownStepError: A step is not known or depends on neighbouring tokens.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        self._maps: list[Callable[[str], Piece]] = []
        self._fused = False
        self._byte_step: str | None = None
        for step in [{"type": None}] if state is None else _flatten(state):
            self._append(step)

    def decode(self, tokens: Iterable[str]) -> list[bytes]:
        """Decode tokens of which each has a neighbour on either side."""
        pieces: list[Piece] = list(tokens)
        for function in self._maps:
            # Step by step over all tokens: a vocabulary is decoded in one call.
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
            raise UnknownStepError(f"decoder step {kind!r}, which is not known")

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
        # One character cannot span two tokens, nor can bytes of single tokens spell
        # one outside ASCII; ByteLevel has spelled everything out already.
        apart = not self._fused and self._byte_step is None
        single = len(pattern) == 1 and (self._byte_step is None or not pattern.isascii())
        if not (apart or single) or not pattern or self._byte_step == "ByteLevel":
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


def _byte_level(token: str) -> bytes:
    spelled = bytes_from_characters(token)
    return token.encode() if spelled is None else spelled


def _byte_fallback(token: str) -> Piece:
    match = _BYTE_FALLBACK.fullmatch(token) if token.startswith("<0x") else None
    return bytes([int(match[1], 16)]) if match else token


def _strip(token: str, content: str, start: int, stop: int) -> str:
    kept = _lstrip(token, content, start)
    return _lstrip(kept[::-1], content, stop)[::-1]


def _lstrip(token: str, content: str, most: int) -> str:
    width = len(token) - len(token.lstrip(content))
    return token[min(width, most) :]


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


def _joined_with_spaces(_: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda token: f" {token}"


_WORD_STEPS: dict[str | None, Callable[[Mapping[str, Any]], Callable[[str], str]]] = {
    "BPEDecoder": _end_of_word,
    "WordPiece": _word_piece,
    None: _joined_with_spaces,
}
