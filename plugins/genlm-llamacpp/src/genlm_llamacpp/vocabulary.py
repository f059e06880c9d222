"""The vocabulary and the tokenizer of a GGUF file."""

from __future__ import annotations

import ctypes
import functools
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from genlm.plugin import ModelLoadError, Vocabulary, VocabularyError, byte_level_bytes
from genlm_llamacpp.library import llama, metadata, recent_messages

# llama_vocab_type
_SENTENCEPIECE, _BYTE_LEVEL, _WORDPIECE, _UNIGRAM = 1, 2, 3, 4

# llama_token_attr
_UNKNOWN, _UNUSED, _NORMAL, _CONTROL, _BYTE = 1, 2, 4, 8, 32

_PIECE_BYTES = 64  # longer tokens take a second call

_PADDING = re.compile(rb"\[PAD\d+\]")
"""Names that llama.cpp's converter assigns to ids without a token."""


class GgufTokenizer:
    """llama.cpp's tokenizer of a GGUF file. Thread-safe; independent of the weights.

    Args:
        file: A GGUF file, or the first file of a split model.

    Attributes:
        bos_token_id: The id that begins a text, or None.
        eos_token_id: The id that ends a text, or None.
        init_kwargs: `add_bos_token`, if the file has this setting.

    Raises:
        ModelLoadError: llama.cpp cannot read the file.
    """

    def __init__(self, file: Path) -> None:
        self._llama = llama()
        params = self._llama.llama_model_default_params()
        params.vocab_only = True
        recent_messages()
        model = self._llama.llama_model_load_from_file(bytes(file), params)
        if not model:
            raise ModelLoadError(f"llama.cpp could not read {str(file)!r}: {recent_messages()}")
        weakref.finalize(self, self._llama.llama_model_free, model)
        self._vocab = self._llama.llama_model_get_vocab(model)
        self.size = int(self._llama.llama_vocab_n_tokens(self._vocab))
        self.kind = int(self._llama.llama_vocab_type(self._vocab))
        bos, eos, add_bos = (
            metadata(model, f"tokenizer.ggml.{name}")
            for name in ("bos_token_id", "eos_token_id", "add_bos_token")
        )
        self.bos_token_id = self._id(self._llama.llama_vocab_bos(self._vocab), bos)
        self.eos_token_id = self._id(self._llama.llama_vocab_eos(self._vocab), eos)
        self.init_kwargs = {} if add_bos is None else {"add_bos_token": add_bos == "true"}
        template = self._llama.llama_model_chat_template(model, None)
        self.chat_template = None if template is None else template.decode(errors="replace")

    @functools.cached_property
    def all_special_ids(self) -> tuple[int, ...]:
        """Ids of control tokens, of unknown tokens, and of tokens marked as unused."""
        special = _UNKNOWN | _UNUSED | _CONTROL
        return tuple(i for i in range(self.size) if self.attributes(i) & special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the special tokens that the file adds to texts.

        Names of special tokens in the text are parsed as these tokens.
        """
        data = text.encode()
        room = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self._llama.llama_tokenize(
                self._vocab, data, len(data), ids, room, add_special_tokens, True
            )
            if count >= 0:
                return ids[:count]
            room = -count

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens and without a change of spaces.

        Raises:
            IndexError: An id is outside the vocabulary.
        """
        return b"".join(map(self.piece, token_ids)).decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that llama.cpp writes for a token.

        Raises:
            IndexError: The id is outside the vocabulary.
        """
        self._check(token_id)
        text = ctypes.create_string_buffer(_PIECE_BYTES)
        length = self._llama.llama_token_to_piece(
            self._vocab, token_id, text, len(text), 0, True
        )
        if length < 0:
            text = ctypes.create_string_buffer(-length)
            length = self._llama.llama_token_to_piece(
                self._vocab, token_id, text, len(text), 0, True
            )
        return text.raw[:length]

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_dict: bool = False,  # noqa: ARG002 - argument of transformers
        **variables: Any,
    ) -> Any:
        """Return the ids of messages, formatted by the file's chat template.

        Raises:
            ValueError: The file has no chat template, and none is passed.
        """
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        source = chat_template or self.chat_template
        if source is None:
            raise ValueError("the file has no chat template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        template = environment.from_string(source)
        ids = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        names = {key: self.text(i).decode() for key, i in ids.items() if i is not None}
        text = template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            **names,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def text(self, token_id: int) -> bytes:
        """Return a token as the file spells it; raises as `piece`."""
        self._check(token_id)
        spelling: bytes = self._llama.llama_vocab_get_text(self._vocab, token_id)
        return spelling

    def attributes(self, token_id: int) -> int:
        """Return llama.cpp's flags of a token; raises as `piece`."""
        self._check(token_id)
        return int(self._llama.llama_vocab_get_attr(self._vocab, token_id))

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.size:  # llama.cpp would end the process
            raise IndexError(f"token id {token_id} of a vocabulary of {self.size} ids")

    def _id(self, token_id: int, setting: str | None) -> int | None:
        """Return an id of llama.cpp, or None if it is a default that is a token of text.

        If a file has no `setting`, the default for byte-level BPE is 11 for example.
        """
        is_valid = 0 <= token_id < self.size
        is_text = is_valid and setting is None and self.attributes(token_id) & _NORMAL
        return token_id if is_valid and not is_text else None


def read_vocabulary(tokenizer: GgufTokenizer) -> Vocabulary:
    """Derive the exact bytes of every token, and verify them against llama.cpp's decoding.

    Raises:
        VocabularyError: The bytes of a token are unknown, or the type of the tokenizer is not
            supported.
    """
    decode = _spelling_decoder(tokenizer)
    token_bytes: dict[int, bytes] = {}
    unused: set[int] = set()
    for token_id in range(tokenizer.size):
        text, attributes = tokenizer.text(token_id), tokenizer.attributes(token_id)
        if attributes & _UNUSED:
            if not _PADDING.fullmatch(text):
                token_bytes[token_id] = text
                unused.add(token_id)
        elif attributes & _BYTE:
            token_bytes[token_id] = bytes([int(text[3:5], 16)])  # <0x0A>
        elif attributes & _NORMAL:
            token_bytes[token_id] = decode(text)
        else:
            token_bytes[token_id] = text
    return Vocabulary.from_bytes(tokenizer, token_bytes, tokenizer.decode, names=unused)


def _spelling_decoder(tokenizer: GgufTokenizer) -> Callable[[bytes], bytes]:
    """Return a function from the spelling of a text token to its bytes."""
    if tokenizer.kind in {_SENTENCEPIECE, _UNIGRAM, _WORDPIECE}:
        return lambda text: text.replace("\u2581".encode(), b" ")
    if tokenizer.kind != _BYTE_LEVEL:
        raise VocabularyError(
            f"the file has a tokenizer of llama.cpp's type {tokenizer.kind}; supported are "
            f"SentencePiece, Unigram, WordPiece and byte-level BPE (1 to 4)"
        )

    def from_characters(text: bytes) -> bytes:
        try:
            return byte_level_bytes(text.decode())
        except UnicodeError as error:
            raise VocabularyError(
                f"the token {text!r} of a byte-level tokenizer has a character outside the 256 "
                f"that represent bytes; its bytes are unknown"
            ) from error

    return from_characters


def _raise(message: str) -> None:
    raise ValueError(message)
