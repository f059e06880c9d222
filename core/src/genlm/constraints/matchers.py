"""Matchers of xgrammar and llguidance behind one interface: fork, accept, fill masks.

The vocabulary passed to the libraries has one additional id, which ends a text. The bit of this
id in a mask shows whether the text is complete, independently of the model's stop tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.core.base.errors import import_required

__all__ = ["LIBRARIES", "LLGuidance", "MatcherLibrary", "XGrammar"]

Words: TypeAlias = npt.NDArray[np.int32]


class MatcherLibrary(ABC):
    """A grammar that a library has compiled for the tokens of a vocabulary."""

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    """Supported forms of grammars: `"json_schema"`, `"ebnf"` or `"lark"`."""

    @staticmethod
    @abstractmethod
    def check(form: str, source: Any, options: Mapping[str, Any]) -> None:
        """Check the syntax of a grammar, without a vocabulary.

        Args:
            form: One of `formats`.
            source: The grammar.
            options: Keyword arguments of the library's compiler.

        Raises:
            ValueError: The library rejects the grammar.
            MissingRequirementError: The library is not installed.
        """

    @abstractmethod
    def __init__(self, form: str, source: Any, options: Mapping[str, Any], texts: list[bytes]):
        """Compile a grammar.

        Args:
            form: One of `formats`.
            source: The grammar.
            options: Keyword arguments of the library's compiler.
            texts: Bytes of each token; empty for tokens without text.

        Raises:
            ValueError: The library rejects the grammar.
        """

    @abstractmethod
    def first(self, text: bytes) -> Any:
        """Return a matcher that has accepted a text; None if the grammar excludes it."""

    @abstractmethod
    def fork(self, matcher: Any, token_id: int) -> Any:
        """Return a copy of a matcher that has accepted a token of its mask."""

    @abstractmethod
    def fill(self, matchers: Sequence[Any], words: Words) -> None:
        """Write the masks of matchers: packed bits of the vocabulary and the end id."""


def _import_library(name: str) -> Any:
    """Import a grammar library."""
    return import_required(name, "this grammar", f"'genlm-core[{name}]'")


@contextmanager
def _rejections() -> Iterator[None]:
    """Raise the errors of xgrammar's parser and compiler as `ValueError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"xgrammar does not accept the grammar: {str(error).strip()}"
        ) from error


class XGrammar(MatcherLibrary):
    """Matchers of xgrammar."""

    name = "xgrammar"
    formats = ("json_schema", "ebnf")

    @staticmethod
    def check(form: str, source: Any, options: Mapping[str, Any]) -> None:
        """Parse a grammar, which takes less than a millisecond."""
        kind = _import_library("xgrammar").Grammar
        parse = kind.from_json_schema if form == "json_schema" else kind.from_ebnf
        with _rejections():
            parse(source, **options)

    def __init__(self, form: str, source: Any, options: Mapping[str, Any], texts: list[bytes]):
        self._library = library = _import_library(self.name)
        raw, end = library.VocabType.RAW, len(texts)
        info = library.TokenizerInfo([*texts, b"</s>"], vocab_type=raw, stop_token_ids=[end])
        compiler = library.GrammarCompiler(info)
        is_schema = form == "json_schema"
        compile_ = compiler.compile_json_schema if is_schema else compiler.compile_grammar
        with _rejections():
            self._grammar = compile_(source, **options)
        self._batch = library.BatchGrammarMatcher()

    def first(self, text: bytes) -> Any:
        """Return a matcher that has accepted a text."""
        matcher = self._library.GrammarMatcher(self._grammar)
        return matcher if not text or matcher.accept_string(text) else None

    def fork(self, matcher: Any, token_id: int) -> Any:
        """Return a copy of a matcher that has accepted a token."""
        fork = matcher.fork()
        if not fork.accept_token(token_id):
            raise RuntimeError(f"xgrammar does not accept token {token_id} of its own mask")
        return fork

    def fill(self, matchers: Sequence[Any], words: Words) -> None:
        """Write the masks in one call, on threads of the library."""
        self._batch.batch_fill_next_token_bitmask(list(matchers), words)


class LLGuidance(MatcherLibrary):
    """Matchers of llguidance."""

    name = "llguidance"
    formats = ("json_schema", "lark")

    @staticmethod
    def check(form: str, source: Any, options: Mapping[str, Any]) -> None:
        """Validate a grammar, which takes a few milliseconds."""
        matcher = _import_library("llguidance").LLMatcher
        if message := matcher.validate_grammar(_guidance_grammar(form, source, options)):
            raise ValueError(f"llguidance does not accept the grammar: {message}")

    def __init__(self, form: str, source: Any, options: Mapping[str, Any], texts: list[bytes]):
        self._library = library = _import_library(self.name)
        self._tokenizer = library.LLTokenizer(library.TokenizerWrapper(_ByteTokenizer(texts)))
        grammar = _guidance_grammar(form, source, options)
        self._first = library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if self._first.is_error():
            message = self._first.get_error()
            raise ValueError(f"llguidance does not accept the grammar: {message}")
        self._fill = _import_library("llguidance.numpy").fill_next_token_bitmask_par
        self._executor = library.LLExecutor()

    def first(self, text: bytes) -> Any:
        """Return a matcher that has accepted a text."""
        matcher = self._first.deep_copy()
        try:
            ids = self._tokenizer.greedy_tokenize(text.decode())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text={text!r}; llguidance takes only whole characters of UTF-8, and xgrammar "
                f"also parts of a character"
            ) from error
        return matcher if not ids or matcher.consume_tokens(ids) else None

    def fork(self, matcher: Any, token_id: int) -> Any:
        """Return a copy of a matcher that has accepted a token."""
        fork = matcher.deep_copy()
        if not fork.consume_token(token_id):
            raise RuntimeError(
                f"llguidance does not accept token {token_id}: {fork.get_error()}"
            )
        return fork

    def fill(self, matchers: Sequence[Any], words: Words) -> None:
        """Write the masks in one call, on threads of the library."""
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._fill(self._executor, pairs, words)


def _guidance_grammar(form: str, source: Any, options: Mapping[str, Any]) -> str:
    if form == "json_schema":
        schema = json.loads(source) if isinstance(source, str) else source
        if options:
            schema = {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}
        source = f"start: %json {json.dumps(schema)}"
    # With forcing, the masks would have only one tokenization of a text that is certain.
    return f'%llguidance {{"no_forcing": true}}\n{source}'


class _ByteTokenizer:
    """The tokenizer interface of llguidance."""

    bos_token_id = None

    def __init__(self, texts: list[bytes]) -> None:
        self.eos_token_id = len(texts)
        self.tokens = [*texts, b"</s>"]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("texts are tokenised greedily")


LIBRARIES: dict[str, type[MatcherLibrary]] = {
    library.name: library for library in (XGrammar, LLGuidance)
}
