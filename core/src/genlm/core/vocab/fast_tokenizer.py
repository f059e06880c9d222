"""Tokenizers of the `tokenizers` library, also as backend of a transformers tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from genlm.core.base.errors import VocabularyError
from genlm.core.vocab.decoder_chain import DecoderChain, UnknownStepError
from genlm.core.vocab.verification import check_added, check_decoding, is_text


def fast_tokenizer_bytes(backend: Any, tokenizer: Any) -> dict[int, bytes]:
    """Derive the bytes of every id of a `tokenizers.Tokenizer`.

    The bytes of a token of the model are those that the decoder returns for it in mid-text. The
    bytes of an added token are its content as UTF-8, the text from which it is encoded, even if
    the decoder returns other bytes (a byte-level decoder reads an added "é" as byte E9). A
    token that is both is an added token if it is special, and a token of the model if the
    tokenizer encodes the decoded text to it (Gemma lists its runs of "▁", which are spaces,
    among the added tokens).

    Args:
        backend: The `tokenizers.Tokenizer`.
        tokenizer: The user's tokenizer: the backend, or one of transformers.
    """
    chain = _chain(backend, tokenizer)
    _check_markers(backend.model, chain, tokenizer)
    _check_byte_fallback(backend.model, chain, tokenizer)
    model_vocab: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    names = _names(backend, model_vocab)
    derived = dict(zip(names, chain.decode(names.values()), strict=True))
    as_is = {} if tokenizer is backend else {"clean_up_tokenization_spaces": False}

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, **as_is))

    check_decoding(derived, decode, tokenizer)

    def encode(text: str) -> list[int]:
        encoding = backend.encode(text, add_special_tokens=False)
        # Ids with attention mask 0 are padding.
        return [key for key, mask in zip(encoding.ids, encoding.attention_mask) if mask]

    for token_id, added in backend.get_added_tokens_decoder().items():
        content, value = added.content.encode(), derived[token_id]
        if value == content:
            continue
        in_model = model_vocab.get(added.content) == token_id
        if in_model and not (is_text(value) and token_id in encode(value.decode())):
            raise VocabularyError(
                f"{type(tokenizer).__name__} has id {token_id} for the added token "
                f"{added.content!r} and for the model's token with the bytes {value!r}, so "
                f"it has no exact bytes; remove the added token or change its content"
            )
        if added.special or not in_model:
            check_added(encode, token_id, added.content, tokenizer)
            derived[token_id] = content
    return derived


def _chain(backend: Any, tokenizer: Any) -> DecoderChain:
    family = type(tokenizer).__name__
    model = type(backend.model).__name__
    if backend.decoder is None and model != "WordLevel":
        raise VocabularyError(
            f"{family} has a {model} model and no decoder, so its tokens have no exact "
            f"bytes; set tokenizer.decoder (tokenizers.decoders.Fuse() if tokens are text)"
        )
    try:
        state = None if backend.decoder is None else backend.decoder.__getstate__()
        return DecoderChain(None if state is None else json.loads(state))
    except UnknownStepError as error:
        raise VocabularyError(
            f"{family} has a {error}; tokens that depend on their neighbours have no exact "
            f"bytes. Use a tokenizer with one of the decoders ByteLevel, ByteFallback, "
            f"Metaspace, WordPiece, BPEDecoder, Replace, Strip, Fuse"
        ) from error
    except Exception as error:
        raise VocabularyError(
            f"{family} has the decoder {type(backend.decoder).__name__}, which the "
            f"tokenizers library cannot serialise ({error}); use a decoder of the library"
        ) from error


def _check_markers(model: Any, chain: DecoderChain, tokenizer: Any) -> None:
    """Check that the decoder removes the model's marks of word boundaries."""
    suffix = getattr(model, "end_of_word_suffix", None) or ""
    prefix = getattr(model, "continuing_subword_prefix", None) or ""
    for mark, token in ((suffix, f"a{suffix}"), (prefix, f"{prefix}a")):
        if mark and mark.encode() in chain.decode([token])[0]:
            raise VocabularyError(
                f"{type(tokenizer).__name__} marks parts of words with {mark!r}, which its "
                f"decoder leaves in the text; set tokenizer.decoder (BPEDecoder for a "
                f"suffix, WordPiece for a prefix)"
            )


def _check_byte_fallback(model: Any, chain: DecoderChain, tokenizer: Any) -> None:
    """Check that the decoder inverts the byte fallback of the model."""
    if model.token_to_id("<0xF4>") is None or chain.decode(["<0xF4>"]) == [b"\xf4"]:
        return
    # No vocabulary has the last code point. Not every model has a flag for byte fallback.
    if [token.value for token in model.tokenize("\U0010ffff")][:1] == ["<0xF4>"]:
        raise VocabularyError(
            f"{type(tokenizer).__name__} spells unknown characters as <0x..>, which its "
            f"decoder leaves in the text; put tokenizers.decoders.ByteFallback() into it"
        )


def _names(backend: Any, model_vocab: Mapping[str, int]) -> dict[int, str]:
    """Return the string of each id that the library passes to the decoder."""
    names = {token_id: name for name, token_id in model_vocab.items()}
    added: Mapping[int, Any] = backend.get_added_tokens_decoder()
    names.update({token_id: token.content for token_id, token in added.items()})
    # If several ids share a string, the library lists it only for one of them.
    for token_id in set(range(max(names, default=-1) + 1)).difference(names):
        name = backend.id_to_token(token_id)
        if name is not None:
            names[token_id] = name
    return names
