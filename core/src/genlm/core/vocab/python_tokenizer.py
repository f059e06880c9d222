"""Tokenizers without a `tokenizers` backend: tiktoken, SentencePiece and Python ones.

Tokenizers written in Python (slow ones of transformers, those of remote code, and wrappers of
mistral-common) are recognised by their parts: a tokenizer of mistral-common, a tiktoken
encoding, a vocabulary of bytes, a SentencePiece model, the byte table of GPT-2, or the
WordPiece of BERT. The tokens of others are texts, such as characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from genlm.core.base.errors import VocabularyError
from genlm.core.vocab.decoder_chain import DecoderChain
from genlm.core.vocab.verification import check_added, check_decoding


def tiktoken_bytes(encoding: Any) -> dict[int, bytes]:
    """Read the bytes of every id of a `tiktoken.Encoding`.

    The bytes of special tokens are their text as UTF-8. Ids that the encoding does not use
    between mergeable and special tokens are not returned.
    """
    bytes_by_id: dict[int, bytes] = {}
    for token_id in range(encoding.n_vocab):
        try:
            bytes_by_id[token_id] = encoding.decode_single_token_bytes(token_id)
        except KeyError:
            continue
    return bytes_by_id


def sentencepiece_bytes(processor: Any) -> dict[int, bytes]:
    """Derive the bytes of every id of a `SentencePieceProcessor`.

    A byte piece has its byte; a user-defined piece with such a name (`<0x41>`) has its text.
    Control and unknown pieces have their names. All other pieces have their text with spaces in
    place of U+2581.
    """
    ids = list(range(processor.get_piece_size()))
    pieces = dict(zip(ids, processor.id_to_piece(ids)))
    derived: dict[int, bytes] = {}
    named: dict[int, bytes] = {}
    for token_id, piece in pieces.items():
        if processor.is_control(token_id) or processor.is_unknown(token_id):
            named[token_id] = piece.encode()
        elif processor.is_byte(token_id):
            derived[token_id] = bytes([int(piece[3:5], 16)])
        else:
            derived[token_id] = piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
    check_decoding(derived, processor.decode, processor)
    return derived | named


def _mistral_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Read the bytes of every id of a tokenizer of mistral-common: Tekken or SentencePiece.

    Special tokens of Tekken have the ids below `num_special_tokens`.
    """
    if not hasattr(tokenizer, "id_to_byte_piece"):
        return sentencepiece_bytes(_part_with(tokenizer, "get_piece_size"))
    first = tokenizer.num_special_tokens
    bytes_by_id = {key: tokenizer.id_to_piece(key).encode() for key in range(first)}
    for key in range(first, tokenizer.n_words):
        bytes_by_id[key] = tokenizer.id_to_byte_piece(key)
    return bytes_by_id


def python_tokenizer_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Derive the bytes of every id of a tokenizer that is written in Python.

    The bytes of tokens in the base vocabulary are those to which they decode in mid-text. The
    bytes of added and special tokens are their content as UTF-8; see `decode_vocab`.
    """
    if (mistral := _mistral_part(tokenizer)) is not None:
        return _mistral_bytes(mistral)
    family = _family(tokenizer)
    if family is None:
        raise VocabularyError(
            f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__} is not a supported "
            f"tokenizer: it has no get_vocab, tiktoken encoding or SentencePiece model. Pass "
            f"its fast version, or a tokenizers.Tokenizer, SentencePieceProcessor or "
            f"tiktoken.Encoding"
        )
    derived = family(tokenizer)
    if family is not _sentencepiece_parts:  # wrappers of SentencePiece decode no byte pieces
        check_decoding(
            derived,
            lambda ids: str(
                tokenizer.decode(
                    ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
            tokenizer,
        )
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
        return _tiktoken_parts
    if _part_with(tokenizer, "get_piece_size") is not None:
        return _sentencepiece_parts
    if not hasattr(tokenizer, "get_vocab"):
        return None
    if any(isinstance(name, bytes) for name in tokenizer.get_vocab()):
        return _bytes_names
    if hasattr(tokenizer, "byte_decoder"):
        return _byte_level
    return _word_piece if hasattr(tokenizer, "wordpiece_tokenizer") else _texts


def _mistral_part(tokenizer: Any) -> Any:
    """Return the tokenizer of mistral-common in one of transformers or vLLM, or None."""
    part = getattr(tokenizer, "tokenizer", None)
    part = getattr(getattr(part, "instruct_tokenizer", None), "tokenizer", part)
    return part if hasattr(part, "num_special_tokens") and hasattr(part, "n_words") else None


def _tiktoken_parts(tokenizer: Any) -> dict[int, bytes]:
    return tiktoken_bytes(_part_with(tokenizer, "decode_single_token_bytes"))


def _sentencepiece_parts(tokenizer: Any) -> dict[int, bytes]:
    """Derive bytes by piece, because wrappers change ids."""
    processor = _part_with(tokenizer, "get_piece_size")
    bytes_by_id = sentencepiece_bytes(processor)
    pieces = processor.id_to_piece(list(bytes_by_id))
    bytes_by_piece = dict(zip(pieces, bytes_by_id.values(), strict=True))
    return _by_name(tokenizer, bytes_by_piece.get, "pieces of its SentencePiece model")


def _bytes_names(tokenizer: Any) -> dict[int, bytes]:
    return _by_name(
        tokenizer,
        lambda name: name if isinstance(name, bytes) else None,
        "bytes like its other tokens",
    )


def _byte_level(tokenizer: Any) -> dict[int, bytes]:
    byte_of: Mapping[str, int] = tokenizer.byte_decoder
    return _by_name(
        tokenizer,
        lambda name: (
            bytes(map(byte_of.__getitem__, name)) if byte_of.keys() >= set(name) else None
        ),
        "spelled in its byte_decoder",
    )


def _word_piece(tokenizer: Any) -> dict[int, bytes]:
    chain = DecoderChain({"type": "WordPiece", "prefix": "##", "cleanup": False})
    ids_by_name: Mapping[str, int] = tokenizer.get_vocab()
    return dict(zip(ids_by_name.values(), chain.decode(ids_by_name), strict=True))


def _texts(tokenizer: Any) -> dict[int, bytes]:
    return _by_name(
        tokenizer,
        # U+FFFD is the name of all parts of characters, of which the vocabulary lists one.
        lambda name: None if "\ufffd" in name else name.encode(errors="replace"),
        "texts",
    )


def _by_name(
    tokenizer: Any, bytes_of: Callable[[Any], bytes | None], expected: str
) -> dict[int, bytes]:
    """Derive the bytes of the tokens of the base vocabulary from their names.

    Raises:
        VocabularyError: `bytes_of` returns None for a name; the message describes valid
            names with `expected`.
    """
    literal = _literal_tokens(tokenizer)
    names = {key: name for name, key in tokenizer.get_vocab().items() if key not in literal}
    derived = {
        key: value for key, name in names.items() if (value := bytes_of(name)) is not None
    }
    unknown = sorted(names.keys() - derived.keys())
    if unknown:
        examples = ", ".join(f"{names[key]!r} (id {key})" for key in unknown[:3])
        raise VocabularyError(
            f"{type(tokenizer).__name__} has {len(unknown)} tokens that are neither special "
            f"nor {expected}: {examples}. Add them as special tokens, or use the fast version"
        )
    return derived


def _part_with(tokenizer: Any, attribute: str) -> Any:
    """Return the part of the tokenizer that has this attribute, or None."""
    parts: Iterable[Any] = getattr(tokenizer, "__dict__", {}).values()
    return next((part for part in parts if hasattr(part, attribute)), None)


def _literal_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the content of special tokens and of tokens outside the base vocabulary."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    size: int = getattr(tokenizer, "vocab_size", 0)
    literal = {
        key: str(token.content) for key, token in added.items() if token.special or key >= size
    }
    special: Mapping[str, int] = getattr(tokenizer, "special_tokens", None) or {}
    return literal | {key: name for name, key in special.items() if isinstance(name, str)}
