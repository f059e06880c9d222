"""`Vocabulary` and `decode_vocab`: the exact bytes of every id of a tokenizer.

The bytes of a token are the bytes that it contributes to a decoded text if it is not the first
token; those of added and special tokens are their content. Each family of tokenizers has a
module that derives the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genlm.core.base.errors import VocabularyError
from genlm.core.base.progress import loading_stage
from genlm.core.vocab.fast_tokenizer import fast_tokenizer_bytes
from genlm.core.vocab.python_tokenizer import (
    python_tokenizer_bytes,
    sentencepiece_bytes,
    tiktoken_bytes,
)
from genlm.core.vocab.token import Token
from genlm.core.vocab.verification import check_decoding

if TYPE_CHECKING:
    import torch

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of an engine: index `i` of a row is token `i`.

    Attributes:
        tokenizer: The engine's tokenizer object.
        byte_vocab: One `Token` per id, `byte_vocab[i].token_id == i`.
        str_vocab: One readable string per id, for display only.
        missing_ids: Ids below `size` without a token, ascending. Their entries in
            `byte_vocab` are empty and their probabilities are 0 in every row.

    Raises:
        VocabularyError: An entry of `byte_vocab` is not the token of its index, or `str_vocab`
            has another length.
    """

    tokenizer: Any
    byte_vocab: list[Token]
    str_vocab: list[str]
    missing_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.str_vocab or ())
        if count != len(self.byte_vocab):
            raise VocabularyError(
                f"byte_vocab has {len(self.byte_vocab)} tokens and str_vocab {count} strings; "
                f"expected one string for each token"
            )
        for index, token in enumerate(self.byte_vocab):
            if not isinstance(token, Token) or token.token_id != index:
                raise VocabularyError(
                    f"byte_vocab[{index}] is {token!r}; expected Token({index}, ...): index i "
                    f"of byte_vocab is the token with token_id i"
                )

    def __repr__(self) -> str:
        missing = f", {len(self.missing_ids)} of them without a token" * bool(self.missing_ids)
        return f"<Vocabulary of {type(self.tokenizer).__name__}: {self.size} ids{missing}>"

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Create the vocabulary of a tokenizer.

        Args:
            tokenizer: Tokenizer as for `decode_vocab`; stored without a copy.

        Raises:
            VocabularyError: The tokens do not have exact bytes.
        """
        loading_stage("vocabulary")
        return cls._from_table(tokenizer, _token_bytes(tokenizer))

    @classmethod
    def from_bytes(
        cls,
        tokenizer: Any,
        bytes_by_id: Mapping[int, bytes],
        decode: Callable[[list[int]], str],
        *,
        names: Collection[int] = (),
    ) -> Vocabulary:
        """Create a vocabulary from the bytes in an engine's tables.

        Args:
            tokenizer: Tokenizer; stored without a copy.
            bytes_by_id: Bytes of each token. Other ids are missing ids.
            decode: The engine's decoding of ids, including special tokens, with which the
                bytes of all tokens are compared.
            names: Ids whose bytes are only names, which `decode` omits.

        Raises:
            VocabularyError: The bytes differ from those of `decode`, or there are no tokens.
        """
        texts = {key: value for key, value in bytes_by_id.items() if key not in names}
        check_decoding(texts, decode, tokenizer)
        return cls._from_table(tokenizer, bytes_by_id)

    @classmethod
    def _from_table(cls, tokenizer: Any, bytes_by_id: Mapping[int, bytes]) -> Vocabulary:
        """Create one token and one readable string for each id up to the largest."""
        if not bytes_by_id:
            raise VocabularyError(
                f"{type(tokenizer).__name__} has no tokens; train or load it first"
            )
        ids = range(max(bytes_by_id) + 1)
        byte_vocab = [Token(key, bytes_by_id.get(key, b"")) for key in ids]
        str_vocab = [token.decode(errors="backslashreplace") for token in byte_vocab]
        missing = tuple(key for key in ids if key not in bytes_by_id)
        return cls(tokenizer, byte_vocab, str_vocab, missing)

    @property
    def size(self) -> int:
        """Number of token ids, the length of every row."""
        return len(self.byte_vocab)

    @property
    def bos_token_id(self) -> int | None:
        """BOS id of the tokenizer, None if it is not defined or not in this vocabulary."""
        return self._token_id("bos")

    @property
    def eos_token_id(self) -> int | None:
        """EOS id of the tokenizer, None if it is not defined or not in this vocabulary."""
        return self._token_id("eos")

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's special tokens, whose bytes are only their names."""
        ids = _special_ids(self.tokenizer, self.size)
        return frozenset(token_id for token_id in ids if 0 <= token_id < self.size)

    def mask(self, predicate: Callable[[bytes], object]) -> torch.Tensor:
        r"""Return a mask of the tokens whose bytes satisfy a predicate.

            digits = llm.vocabulary.mask(bytes.isdigit)
            digits[llm.tokenizer.eos_token_id] = True       # special tokens are set by id
            row.masked_fill_(~digits, -math.inf)

        Args:
            predicate: Function of the bytes of a text token, as plain `bytes`; its result is
                converted to bool.

        Returns:
            Bools, shape `(size,)`, on the CPU, which belong to the caller. False for special
            tokens, including EOS, and for ids without a token.

        Raises:
            TypeError: `predicate` is not callable, or does not accept `bytes`.
        """
        import torch

        if not callable(predicate):
            raise TypeError(
                f"expected a function of a token's bytes, such as bytes.isdigit; found "
                f"{type(predicate).__name__} {predicate!r}"
            )
        flags = bytearray(self.size)  # setting the items of a tensor takes microseconds each
        for token_id, text in self._texts():
            try:
                flags[token_id] = bool(predicate(text))
            except TypeError as error:
                raise TypeError(
                    f"the predicate failed for {text!r}: {error}. It gets bytes: write "
                    f"b'e' in token, not 'e' in token"
                ) from error
        return torch.frombuffer(flags, dtype=torch.bool)

    def ids_of(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of text tokens with exactly these bytes, ascending.

        Most vocabularies have at most one such id; a text of several tokens has none. For the
        usual tokenization of a text, use `llm.tokenizer.encode`.

        Raises:
            TypeError: `text` is not `bytes`.
        """
        if not isinstance(text, bytes):
            raise TypeError(
                f"ids_of({text!r}): expected bytes, such as b'the' or text.encode()"
            )
        return self._ids_by_bytes.get(bytes(text), ())

    @functools.cached_property
    def _ids_by_bytes(self) -> dict[bytes, tuple[int, ...]]:
        ids: dict[bytes, list[int]] = {}
        for key, text in self._texts():
            ids.setdefault(text, []).append(key)
        return {text: tuple(keys) for text, keys in ids.items()}

    def _texts(self) -> list[tuple[int, bytes]]:
        """Return the ids and plain bytes of the text tokens."""
        without_text = self.special_ids.union(self.missing_ids)
        return [
            (token.token_id, token.byte_string)
            for token in self.byte_vocab
            if token.token_id not in without_text
        ]

    def _token_id(self, role: str) -> int | None:
        token_id = getattr(self.tokenizer, f"{role}_token_id", None)
        if hasattr(self.tokenizer, "get_piece_size"):  # sentencepiece
            token_id = getattr(self.tokenizer, f"{role}_id")()  # -1 for none
        elif role == "eos" and "<|endoftext|>" in getattr(
            self.tokenizer, "special_tokens_set", ()
        ):
            token_id = self.tokenizer.eot_token  # tiktoken
        is_valid = isinstance(token_id, int) and 0 <= token_id < self.size
        return token_id if is_valid else None


def decode_vocab(tokenizer: Any) -> tuple[list[Token], list[str]]:
    r"""Decode a tokenizer to the exact bytes, and a readable string, of every token.

    The bytes of a token are the bytes that it contributes to a decoded text if it is not the
    first token: a SentencePiece `▁the` is `b" the"` and `<0x0A>` is `b"\n"`. A WordPiece token
    that begins a word has a leading space; `##ing`, and punctuation before which the decoder's
    `cleanup` removes the space, have none. The concatenated bytes of a sequence are its decoded
    text, except for a space that some tokenizers drop at the start of a text, or at the end if
    they mark the ends of words. The bytes of added and special tokens are their content in
    UTF-8. All derived bytes are compared with the tokenizer's decoding.

    Args:
        tokenizer: A tokenizer of transformers (fast, Python, or of mistral-common),
            `tokenizers`, `sentencepiece` or `tiktoken`; not changed.

    Returns:
        The tokens, and strings of them for display, with `\x..` for bytes that are not UTF-8;
        index `i` of both is id `i`. Ids without a token have empty bytes.

    Raises:
        VocabularyError: The tokenizer is of an unknown kind, or its tokens do not have
            exact bytes.
    """
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    return vocabulary.byte_vocab, vocabulary.str_vocab


def _token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return the exact bytes of each token by id; see `decode_vocab`."""
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return tiktoken_bytes(tokenizer)
    if hasattr(tokenizer, "get_piece_size"):
        return sentencepiece_bytes(tokenizer)
    for backend in (tokenizer, getattr(tokenizer, "backend_tokenizer", None)):
        if hasattr(backend, "get_added_tokens_decoder"):
            return fast_tokenizer_bytes(backend, tokenizer)
    return python_tokenizer_bytes(tokenizer)


def _special_ids(tokenizer: Any, size: int) -> Iterator[int]:
    """Yield the ids that are not text, such as EOS; some may be outside the vocabulary.

    The tokenizer is one of transformers, `tokenizers`, `sentencepiece` or `tiktoken`, or any
    object with attributes such as `eos_token_id`.
    """
    for name in _SPECIAL_NAMES:
        value = getattr(tokenizer, f"{name}_token_id", None)
        if isinstance(value, int):
            yield value
    yield from getattr(tokenizer, "all_special_ids", ())
    # Reserved tokens of a model family are often added as special without having a role.
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    if isinstance(added, Mapping):  # a method that raises for tokenizers of mistral-common
        yield from (key for key, token in added.items() if token.special)
    if hasattr(tokenizer, "decode_single_token_bytes"):  # tiktoken
        yield from map(tokenizer.encode_single_token, tokenizer.special_tokens_set)
    if hasattr(tokenizer, "get_piece_size"):  # sentencepiece
        pieces = range(min(size, tokenizer.get_piece_size()))
        yield from (i for i in pieces if tokenizer.is_control(i) or tokenizer.is_unknown(i))
