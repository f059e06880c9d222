"""Matchers of xgrammar and llguidance behind one interface: accept tokens, fill masks.

The vocabulary passed to the libraries has one additional id, which ends a text. The bit of this
id in a mask shows whether the text is complete, independently of the model's stop tokens.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.constraints.protocol import Integers64
from genlm.constraints.text_tokens import TextTokens, text_tokens
from genlm.core.base.error_handling import import_required
from genlm.core.vocab.per_vocabulary import PerVocabulary

if TYPE_CHECKING:
    from genlm.core.vocab import Vocabulary

Words: TypeAlias = npt.NDArray[np.int32]

_PLACE = re.compile(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: \(.*?\) is false: )?")
"""The time and the line of xgrammar's source with which its errors begin."""


class _Matcher:
    """A matcher of a library, and the number of tokens that it has accepted."""

    __slots__ = ("length", "matcher")

    def __init__(self, matcher: Any, length: int) -> None:
        self.matcher = matcher
        self.length = length


class MatcherState(NamedTuple):
    """The state of a matcher after its first `length` tokens; it may have accepted more."""

    matcher: _Matcher
    length: int


class GrammarSource(NamedTuple):
    """A grammar before it is compiled.

    Attributes:
        form: `"json_schema"`, `"ebnf"` or `"lark"`.
        text: Rules, or a schema, which may also be a mapping.
        options: Keyword arguments of the library's compiler.
    """

    form: str
    text: Any
    options: Mapping[str, Any]


class MatcherLibrary(ABC):
    """A grammar that a library has compiled for the tokens of a vocabulary."""

    tokens: TextTokens
    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    """Supported forms of grammars."""

    @staticmethod
    @abstractmethod
    def check(source: GrammarSource) -> None:
        """Check the syntax of a grammar, without a vocabulary.

        Raises:
            ValueError: The library rejects the grammar.
            MissingRequirementError: The library is not installed.
        """

    @abstractmethod
    def __init__(self, source: GrammarSource, vocabulary: Vocabulary, stop: Integers64) -> None:
        """Compile a grammar.

        Args:
            source: The grammar, whose form is one of `formats`.
            vocabulary: The vocabulary.
            stop: Token ids that end a text, ascending.

        Raises:
            ValueError: The library rejects the grammar.
        """

    def first(self, text: bytes) -> MatcherState | None:
        """Return the state after a text; None if the grammar excludes it."""
        matcher = self._first(text)
        return None if matcher is None else MatcherState(_Matcher(matcher, 0), 0)

    def after(
        self, states: Sequence[MatcherState], token_ids: Sequence[int]
    ) -> list[MatcherState]:
        """Return the states after a token of the mask of each; -1 returns a copy.

        A matcher accepts the token itself if it has accepted none after the state. Otherwise a
        copy accepts it, so that states do not change.
        """
        after, token_of = [], {}
        for (matcher, length), token_id in zip(states, token_ids, strict=True):
            if token_id < 0 or matcher.length > length or matcher in token_of:
                copy = self._copy(matcher.matcher, matcher.length - length)
                matcher = _Matcher(copy, length)  # noqa: PLW2901
            if token_id >= 0:
                token_of[matcher] = token_id
            after.append(MatcherState(matcher, length + (token_id >= 0)))
        if token_of:
            self._accept([matcher.matcher for matcher in token_of], [*token_of.values()])
        for matcher in token_of:
            matcher.length += 1
        return after

    def fill(self, states: Sequence[MatcherState], words: Words) -> None:
        """Write the masks of new states: packed bits of the vocabulary and the end id."""
        self._fill([state.matcher.matcher for state in states], words)

    @abstractmethod
    def _first(self, text: bytes) -> Any:
        """Return a matcher that has accepted a text; None if the grammar excludes it."""

    @abstractmethod
    def _copy(self, matcher: Any, count: int) -> Any:
        """Return a copy of a matcher, without the last `count` tokens."""

    @abstractmethod
    def _accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> None:
        """Let each matcher accept a token."""

    @abstractmethod
    def _fill(self, matchers: Sequence[Any], words: Words) -> None:
        """Write the masks of matchers in one call."""


def _import_library(name: str) -> Any:
    """Import a grammar library."""
    return import_required(name, "this grammar", f"'genlm-core[{name}]'")


@contextmanager
def _rejections() -> Iterator[None]:
    """Raise the errors of xgrammar's parser and compiler as `ValueError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        message = _PLACE.sub("", str(error)).strip()
        raise ValueError(f"xgrammar does not accept the grammar: {message}") from error


def _parsed_grammar(source: GrammarSource) -> Any:
    """Parse a grammar with xgrammar."""
    kind = _import_library("xgrammar").Grammar
    parse = kind.from_json_schema if source.form == "json_schema" else kind.from_ebnf
    with _rejections():
        return parse(source.text, **source.options)


def _tokenizer_info(vocabulary: Vocabulary, stop: Integers64) -> Any:
    """Return xgrammar's form of a vocabulary, with one more id, which ends a text."""
    library = _import_library("xgrammar")
    texts = text_tokens.get(vocabulary, stop).texts
    info = library.TokenizerInfo(
        [*texts, b"</s>"], vocab_type=library.VocabType.RAW, stop_token_ids=[len(texts)]
    )
    fields, ranges = json.loads(info.serialize_json()), "trie_subtree_nodes_range"
    if ranges not in fields:
        return info
    # After a token that is not allowed, xgrammar skips those that begin with it, and xgrammar
    # 0.2 also those that contain it, such as "bba" after "ba". A byte is a character of JSON.
    ordered = [text for _, text in fields["sorted_decoded_vocab"]]
    fields[ranges] = [bisect_left(ordered, f"{text}\u0100") for text in ordered]
    return library.TokenizerInfo.deserialize_json(json.dumps(fields))


_tokenizer_infos = PerVocabulary(_tokenizer_info)
"""Creating one takes half a second for 128,000 tokens; a grammar takes a few milliseconds."""


class XGrammar(MatcherLibrary):
    """Matchers of xgrammar."""

    name = "xgrammar"
    formats = ("json_schema", "ebnf")

    @staticmethod
    def check(source: GrammarSource) -> None:
        """Parse a grammar, which takes less than a millisecond."""
        _parsed_grammar(source)

    def __init__(self, source: GrammarSource, vocabulary: Vocabulary, stop: Integers64) -> None:
        self._library = library = _import_library(self.name)
        self.tokens = text_tokens.get(vocabulary, stop)
        info = _tokenizer_infos.get(vocabulary, stop)
        # If the start rule refers to itself, xgrammar 0.2 excludes tokens that continue after
        # an inner use of it. A concatenation has a start rule that no rule refers to.
        grammar = library.Grammar.concat(_parsed_grammar(source))
        # With a cache, a compiler reads the printed grammar, in which "éb" is the one character
        # "\\xe9b".
        compiler = library.GrammarCompiler(info, cache_enabled=False)
        with _rejections():
            self._grammar = compiler.compile_grammar(grammar)
        self._batch = library.BatchGrammarMatcher()

    def _first(self, text: bytes) -> Any:
        matcher = self._library.GrammarMatcher(self._grammar)
        return matcher if not text or matcher.accept_string(text) else None

    def _copy(self, matcher: Any, count: int) -> Any:
        fork = matcher.fork()
        fork.rollback(count)
        return fork

    def _accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> None:
        are_accepted = self._batch.batch_accept_token(matchers, token_ids)
        if not all(are_accepted):
            token_id = token_ids[are_accepted.index(False)]
            raise RuntimeError(f"xgrammar does not accept token {token_id} of its own mask")

    def _fill(self, matchers: Sequence[Any], words: Words) -> None:
        self._batch.batch_fill_next_token_bitmask(list(matchers), words)


class LLGuidance(MatcherLibrary):
    """Matchers of llguidance."""

    name = "llguidance"
    formats = ("json_schema", "lark")

    @staticmethod
    def check(source: GrammarSource) -> None:
        """Validate a grammar, which takes a few milliseconds."""
        matcher = _import_library("llguidance").LLMatcher
        if message := matcher.validate_grammar(_guidance_grammar(source)):
            raise ValueError(f"llguidance does not accept the grammar: {message}")

    def __init__(self, source: GrammarSource, vocabulary: Vocabulary, stop: Integers64) -> None:
        self._library = library = _import_library(self.name)
        self.tokens = text_tokens.get(vocabulary, stop)
        self._tokenizer = _byte_tokenizers.get(vocabulary, stop)
        self._words = -(-self._tokenizer.vocab_size // 32)
        grammar = _guidance_grammar(source)
        self._matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if self._matcher.is_error():
            message = self._matcher.get_error()
            raise ValueError(f"llguidance does not accept the grammar: {message}")
        self._fill_rows = _import_library("llguidance.numpy").fill_next_token_bitmask_par
        self._executor = library.LLExecutor()

    def _first(self, text: bytes) -> Any:
        matcher = self._matcher.deep_copy()
        try:
            ids = self._tokenizer.greedy_tokenize(text.decode())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"text={text!r}; llguidance takes only whole characters of UTF-8, and xgrammar "
                f"also parts of a character"
            ) from error
        return matcher if not ids or matcher.consume_tokens(ids) else None

    def _copy(self, matcher: Any, count: int) -> Any:
        copy = matcher.deep_copy()
        copy.rollback(count)
        return copy

    def _accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> None:
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            if not matcher.consume_token(token_id):
                raise RuntimeError(
                    f"llguidance does not accept token {token_id}: {matcher.get_error()}"
                )

    def _fill(self, matchers: Sequence[Any], words: Words) -> None:
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        is_wider = words.shape[1] < self._words
        filled = np.zeros((len(words), self._words), np.int32) if is_wider else words
        self._fill_rows(self._executor, pairs, filled)
        for matcher, row in pairs:
            # If nothing can follow an incomplete text, the library allows the end.
            if matcher.is_error():
                if not (message := matcher.get_error()).startswith("NoExtension"):
                    raise RuntimeError(f"llguidance cannot compute a mask: {message}")
                filled[row] = 0
        if is_wider:
            words[:] = filled[:, : words.shape[1]]


def _guidance_grammar(source: GrammarSource) -> str:
    form, text, options = source
    if form == "json_schema":
        schema = json.loads(text) if isinstance(text, str) else text
        if options:
            if not isinstance(schema, dict):
                raise ValueError(
                    f"llguidance takes options only for a schema that is an object; found "
                    f"{schema!r}"
                )
            schema = {**schema, "x-guidance": {**(schema.get("x-guidance") or {}), **options}}
        text = f"start: %json {json.dumps(schema)}"
    # With forcing, the masks would have only one tokenization of a text that is certain.
    return f'%llguidance {{"no_forcing": true}}\n{text}'


class _ByteTokenizer:
    """The tokenizer interface of llguidance.

    The tokens are those of the vocabulary, the end, and the bytes that the vocabulary lacks.
    Without these, the library ignores such bytes of a text and ends texts that need them.
    """

    bos_token_id = None

    def __init__(self, texts: list[bytes]) -> None:
        self.eos_token_id = len(texts)
        single_bytes = [bytes([byte]) for byte in range(256)]
        lacking = sorted({*single_bytes}.difference(texts))
        self.tokens = [*texts, b"</s>", *lacking]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("texts are tokenised greedily")


def _byte_tokenizer(vocabulary: Vocabulary, stop: Integers64) -> Any:
    """Return llguidance's form of a vocabulary."""
    library = _import_library("llguidance")
    tokenizer = _ByteTokenizer(text_tokens.get(vocabulary, stop).texts)
    return library.LLTokenizer(library.TokenizerWrapper(tokenizer))


_byte_tokenizers = PerVocabulary(_byte_tokenizer)

LIBRARIES: dict[str, type[MatcherLibrary]] = {
    library.name: library for library in (XGrammar, LLGuidance)
}
