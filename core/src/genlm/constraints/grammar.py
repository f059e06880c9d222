"""`Grammar`: context-free languages, with matchers of xgrammar or llguidance."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from genlm.constraints.matchers import LIBRARIES, MatcherLibrary, Words
from genlm.constraints.protocol import (
    Constraint,
    Flags,
    Integers64,
    IntegersLike,
    Language,
)
from genlm.constraints.states import DEAD, FINISHED, LIVE, StateConstraint, token_column
from genlm.constraints.text_tokens import PerVocabulary, TextTokens, text_tokens

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.lm import AsyncLM
    from genlm.core.vocab import Vocabulary

__all__ = ["Grammar"]


class Grammar(Language):
    """A context-free language, created with `json_schema`, `ebnf` or `lark`.

    A population has one matcher of the library for each distinct history of its members. After
    each step, matchers are forked and accept their tokens, and one call of the library, on
    another thread, fills all masks.
    """

    def __init__(
        self, library: str, form: str, source: Any, options: Mapping[str, Any] | None = None
    ) -> None:
        fitting = [name for name, each in LIBRARIES.items() if form in each.formats]
        if library not in fitting:
            raise ValueError(
                f"library={library!r} for {form}; expected one of {', '.join(fitting)}"
            )
        self._library, self._form = library, form
        given = options or {}

        def compiled(vocabulary: Vocabulary, stop: Integers64) -> _Compiled:
            tokens = text_tokens.get(vocabulary, stop)
            matchers = LIBRARIES[library](form, source, given, tokens.texts)
            return _Compiled(matchers, tokens)

        self._compiled = PerVocabulary(compiled)

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], *, library: str = "xgrammar", **options: Any
    ) -> Grammar:
        """Return the language of the JSON documents that are valid under a schema.

        Args:
            schema: The schema as text or as a mapping.
            library: `"xgrammar"` or `"llguidance"`.
            **options: Options of the library's compiler. White space is unrestricted by
                default, and limited to single spaces with `any_whitespace=False` for xgrammar,
                `whitespace_flexible=False` for llguidance.

        Raises:
            ValueError: `library` has another value.
        """
        return cls(library, "json_schema", schema, options)

    @classmethod
    def ebnf(cls, grammar: str, *, root: str = "root") -> Grammar:
        """Return the language of a grammar in xgrammar's EBNF, which is GBNF.

        Args:
            grammar: Rules such as `root ::= "yes" | "no"`.
            root: Name of the start rule.
        """
        return cls("xgrammar", "ebnf", grammar, {"root_rule_name": root})

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return the language of a grammar in llguidance's variant of Lark.

        Args:
            grammar: Rules such as `start: "yes" | "no"`.
        """
        return cls("llguidance", "lark", grammar)

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`.

        Args:
            llm: As `Language.start`.
            size: As `Language.start`.
            text: As `Language.start`; valid UTF-8 for llguidance.
            stop: As `Language.start`.

        Raises:
            ValueError: As `Language.start`, or the library rejects the grammar.
            MissingRequirementError: The library is not installed.
        """
        compiled = self._compiled.get(llm.vocabulary, stop)
        matcher = compiled.library.first(text)
        if matcher is None:
            raise ValueError(f"no text of {self!r} begins with {text!r}")
        return _Matched(compiled, matcher, size).ended()

    def __repr__(self) -> str:
        return f"<Grammar of {self._form}, by {self._library}>"


class _Compiled(NamedTuple):
    """A grammar compiled for the tokens of a vocabulary."""

    library: MatcherLibrary
    tokens: TextTokens


class _Step(NamedTuple):
    """The states of a population after a step; they are not changed afterwards.

    Attributes:
        matchers: Matcher of each distinct live state, in the order of the states.
        masks: Allowed tokens of all states, packed bits; empty for dead and finished members.
        is_over: Whether a state ends a text without a stop token: it is complete and has no
            continuation.
    """

    matchers: list[Any]
    masks: Words
    is_over: Flags


def _filled(compiled: _Compiled, matchers: list[Any]) -> _Step:
    size, stop = len(compiled.tokens.texts), compiled.tokens.stop
    words = np.zeros((LIVE + len(matchers), -(-(size + 1) // 32)), np.int32)
    if matchers:
        compiled.library.fill(matchers, words[LIVE:])
    states = np.arange(len(words))
    is_complete = _bits(words, states, np.full(len(words), size))
    words[:, size // 32] &= np.int32((1 << size % 32) - 1)  # no bit beyond the vocabulary
    masks = np.ascontiguousarray(words[:, : -(-size // 32)])
    is_over = is_complete & ~masks.any(1) & (not stop.size)
    for token_id in stop.tolist():
        bit = np.array(1 << token_id % 32, np.uint32).view(np.int32)
        masks[is_complete, token_id // 32] |= bit
    return _Step(matchers, masks, is_over)


def _bits(words: Words, rows: Integers64, token_ids: Integers64) -> Flags:
    """Return the bits of tokens in rows."""
    found: Flags = (words[rows, token_ids >> 5] >> (token_ids & 31).astype(np.int32) & 1) > 0
    return found


def _advanced(
    compiled: _Compiled, before: Future[_Step], parents: Integers64, token_ids: Integers64
) -> _Step:
    """Fork matchers and let them accept tokens; -1 leaves a matcher unchanged."""
    known, library = before.result().matchers, compiled.library
    matchers = [
        known[parent] if token_id < 0 else library.accepted(known[parent], token_id)
        for parent, token_id in zip(parents.tolist(), token_ids.tolist(), strict=True)
    ]
    return _filled(compiled, matchers)


class _PendingMasks(NamedTuple):
    """Masks of states that the constraint's thread computes."""

    step: Future[_Step]

    def result(self) -> torch.Tensor:
        return torch.from_numpy(self.step.result().masks)


class _Matched(StateConstraint):
    """Members whose states are matchers, which members with equal histories share."""

    def __init__(self, compiled: _Compiled, matcher: Any, size: int) -> None:
        super().__init__(np.full(size, LIVE))
        self.compiled = compiled
        # One thread, so that steps are computed in order.
        self.thread = ThreadPoolExecutor(1, "genlm-grammar")
        self.step = self.thread.submit(_filled, compiled, [matcher])

    def masks(self) -> tuple[torch.Tensor, Integers64]:
        """Return the masks of the distinct states; waits until they are filled."""
        return torch.from_numpy(self.step.result().masks), self.states

    def _draw_masks(self) -> tuple[_PendingMasks, Integers64]:
        return _PendingMasks(self.step), self.states

    def advance(self, token_ids: IntegersLike) -> Self:
        """Determine the distinct new states, which another thread computes."""
        tokens, states = self.compiled.tokens, self.states
        ids = token_column(token_ids, len(self), len(tokens.texts))
        is_allowed = _bits(self.step.result().masks, states, ids)
        # The parent and the token of each new state; a token of -1 leaves a state as it is.
        keys = states * (len(tokens.texts) + 1) + ids + 1
        keys[(ids >= 0) & ~is_allowed] = DEAD
        keys[is_allowed & tokens.is_stop[ids]] = FINISHED
        keys[states < LIVE] = states[states < LIVE]
        distinct, index = np.unique(
            np.concatenate([[DEAD, FINISHED], keys]), return_inverse=True
        )
        parents, after = np.divmod(distinct[LIVE:], len(tokens.texts) + 1)
        found = self.moved(index[LIVE:])
        found.step = self.thread.submit(
            _advanced, self.compiled, self.step, parents - LIVE, after - 1
        )
        return found.ended()

    def ended(self) -> Self:
        """Finish members whose text has no continuation, for models without stop tokens."""
        if self.compiled.tokens.stop.size:
            return self
        is_over = self.step.result().is_over[self.states]
        return self.moved(np.where(is_over, FINISHED, self.states))
