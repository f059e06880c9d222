"""Tokenizers written in Python: transformers' slow ones and those of remote code.

Recognised by what does the work inside: a tiktoken encoding, a vocabulary of bytes,
a SentencePiece model, the byte table of GPT-2's code, or BERT's WordPiece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from genlm.core.errors import VocabularyError
from genlm.core.vocab.decoder_chain import DecoderChain
from genlm.core.vocab.sentencepiece_model import sentencepiece_bytes
from genlm.core.vocab.tiktoken_encoding import tiktoken_bytes
from genlm.core.vocab.verification import check_added, check_decoding

__all__ = ["python_tokenizer_bytes"]


def python_tokenizer_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Derive the bytes of every id of a tokenizer without a Rust backend.

    The base vocabulary's tokens are what the tokenizer's decoding makes of them in
    mid-text, added and special tokens their content as UTF-8; see `decode_vocab`.

    Raises:
        VocabularyError: Nothing known does the work, or decoding disagrees.
    """
    family = _family(tokenizer)
    if family is None:
        raise VocabularyError(
            f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__} is no tokenizer "
            f"whose tokens can be decoded: no tiktoken encoding, SentencePiece model, "
            f"byte_decoder or WordPiece vocabulary was found in it. Pass its fast version, "
            f"or a tokenizers.Tokenizer, SentencePieceProcessor or tiktoken.Encoding"
        )
    derived = family(tokenizer)
    for token_id, content in _literal_tokens(tokenizer).items():
        if derived.get(token_id) != content.encode():
            check_added(
                lambda text: tokenizer.encode(text, add_special_tokens=False),
                token_id,
                content,
                tokenizer,
            )
            derived[token_id] = content.encode()
    return derived


def _family(tokenizer: Any) -> Callable[[Any], dict[int, bytes]] | None:
    if _part_with(tokenizer, "decode_single_token_bytes") is not None:
        return _around_tiktoken
    if _part_with(tokenizer, "get_piece_size") is not None:
        return _around_sentencepiece
    if not hasattr(tokenizer, "get_vocab"):
        return None
    if any(isinstance(name, bytes) for name in tokenizer.get_vocab()):
        return _of_bytes
    if hasattr(tokenizer, "byte_decoder"):
        return _byte_level
    return _word_piece if hasattr(tokenizer, "wordpiece_tokenizer") else None


def _around_tiktoken(tokenizer: Any) -> dict[int, bytes]:
    derived = tiktoken_bytes(_part_with(tokenizer, "decode_single_token_bytes"))
    check_decoding(derived, _decoding(tokenizer), tokenizer)
    return derived


def _around_sentencepiece(tokenizer: Any) -> dict[int, bytes]:
    """Bytes by piece, for wrappers move the ids and decode no byte pieces."""
    processor = _part_with(tokenizer, "get_piece_size")
    bytes_by_id = sentencepiece_bytes(processor)
    pieces = processor.id_to_piece(list(bytes_by_id))
    bytes_by_piece = dict(zip(pieces, bytes_by_id.values(), strict=True))
    literal = _literal_tokens(tokenizer)
    names = {key: name for name, key in tokenizer.get_vocab().items() if key not in literal}
    unknown = {key: name for key, name in names.items() if name not in bytes_by_piece}
    if unknown:
        raise _unexplained(tokenizer, unknown, "pieces of its SentencePiece model")
    return {key: bytes_by_piece[name] for key, name in names.items()}


def _of_bytes(tokenizer: Any) -> dict[int, bytes]:
    literal = _literal_tokens(tokenizer)
    names = {key: name for name, key in tokenizer.get_vocab().items() if key not in literal}
    unknown = {key: name for key, name in names.items() if not isinstance(name, bytes)}
    if unknown:
        raise _unexplained(tokenizer, unknown, "bytes, as its other tokens are")
    check_decoding(names, _decoding(tokenizer), tokenizer)
    return names


def _byte_level(tokenizer: Any) -> dict[int, bytes]:
    byte_of: Mapping[str, int] = tokenizer.byte_decoder
    literal = _literal_tokens(tokenizer)
    names = {key: name for name, key in tokenizer.get_vocab().items() if key not in literal}
    unknown = {key: name for key, name in names.items() if not byte_of.keys() >= set(name)}
    if unknown:
        raise _unexplained(tokenizer, unknown, "spelled in its byte_decoder")
    derived = {key: bytes([byte_of[char] for char in name]) for key, name in names.items()}
    check_decoding(derived, _decoding(tokenizer), tokenizer)
    return derived


def _word_piece(tokenizer: Any) -> dict[int, bytes]:
    chain = DecoderChain({"type": "WordPiece", "prefix": "##", "cleanup": False})
    ids_by_name: Mapping[str, int] = tokenizer.get_vocab()
    derived = dict(zip(ids_by_name.values(), chain.decode(ids_by_name), strict=True))
    check_decoding(derived, _decoding(tokenizer), tokenizer)
    return derived


def _part_with(tokenizer: Any, attribute: str) -> Any:
    """What the tokenizer holds that has the attribute, None if nothing does."""
    parts: Iterable[Any] = getattr(tokenizer, "__dict__", {}).values()
    return next((part for part in parts if hasattr(part, attribute)), None)


def _literal_tokens(tokenizer: Any) -> dict[int, str]:
    """Content of special tokens and of those outside the base vocabulary."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    size: int = getattr(tokenizer, "vocab_size", 0)
    literal = {
        key: str(token.content) for key, token in added.items() if token.special or key >= size
    }
    special: Mapping[str, int] = getattr(tokenizer, "special_tokens", None) or {}
    return literal | {key: name for name, key in special.items() if isinstance(name, str)}


def _decoding(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _unexplained(tokenizer: Any, unknown: Mapping[int, object], expected: str) -> Exception:
    shown = ", ".join(f"{name!r} (id {key})" for key, name in sorted(unknown.items())[:3])
    return VocabularyError(
        f"{type(tokenizer).__name__} has {len(unknown)} tokens that are neither special nor "
        f"{expected}: {shown}. Add them as special tokens, or use the fast version"
    )
