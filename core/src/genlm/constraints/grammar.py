"""`Grammar`: context-free languages, followed by matchers of xgrammar or llguidance."""

from __future__ import annotations

import copy
import functools
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
    PerVocabulary,
    TextTokens,
    chosen_members,
    token_column,
)

if TYPE_CHECKING:
    from genlm.core.lm import AsyncLM
    from genlm.core.population import DrawnTokens, Population
    from genlm.core.validation import Integers

__all__ = ["Grammar"]


class Grammar(Language):
    """A context-free language: make it with `json_schema`, `ebnf` or `lark`.

    The members of a population have a matcher of the library for each of their distinct
    histories. After each step matchers are forked and accept their tokens, and the masks of
    all of them are filled by one call of the library, on another thread.
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
        build = functools.partial(_compiled, library, form, source, options or {})
        self._compiled = PerVocabulary(build)

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], *, library: str = "xgrammar", **options: Any
    ) -> Grammar:
        """Return the JSON documents that fit a schema.

        Args:
            schema: The schema as text or as a mapping.
            library: `"xgrammar"` or `"llguidance"`.
            **options: Passed to the library's compiler: by default xgrammar allows any white
                space, and `any_whitespace=False` none but single spaces; for llguidance that is
                `whitespace_flexible=False`.

        Raises:
            ValueError: Another library.
        """
        return cls(library, "json_schema", schema, options)

    @classmethod
    def ebnf(cls, grammar: str, *, root: str = "root") -> Grammar:
        """Return the language of a grammar in xgrammar's form of EBNF, that of GBNF.

        Args:
            grammar: Rules such as `root ::= "yes" | "no"`.
            root: Name of the rule that a text follows.
        """
        return cls("xgrammar", "ebnf", grammar, {"root_rule_name": root})

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return the language of a grammar in llguidance's form of Lark.

        Args:
            grammar: Rules such as `start: "yes" | "no"`.
        """
        return cls("llguidance", "lark", grammar)

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of members that have none of a text yet, or its beginning.

        Args:
            llm: As `Language.start`.
            size: As `Language.start`.
            text: As `Language.start`; for llguidance, valid UTF-8.
            stop: As `Language.start`.

        Raises:
            ValueError: As `Language.start`, or the library does not accept the grammar.
            MissingRequirementError: The library is not installed.
        """
        compiled = self._compiled.get(llm.vocabulary, stop)
        matcher = compiled.library.first(text)
        if matcher is None:
            raise ValueError(f"no text of {self!r} begins with {text!r}")
        return _Matched(compiled, matcher, size)

    def __repr__(self) -> str:
        return f"<Grammar of {self._form}, by {self._library}>"


class _Compiled(NamedTuple):
    """A grammar for the tokens of a vocabulary."""

    library: MatcherLibrary
    tokens: TextTokens
    is_stop: Flags


def _compiled(
    library: str, form: str, source: Any, options: Mapping[str, Any], tokens: TextTokens
) -> _Compiled:
    is_stop = np.zeros(len(tokens.texts), np.bool_)
    is_stop[tokens.stop] = True
    return _Compiled(LIBRARIES[library](form, source, options, tokens.texts), tokens, is_stop)


class _Matchers(NamedTuple):
    """The distinct states of a population after a step; none of them is changed any more.

    Attributes:
        matchers: A matcher for each state.
        masks: The tokens that are allowed in each state, packed bits, one row more than
            states: an empty mask for members that need no state.
        is_over: States that end a text without a stop token: complete, and nothing follows.
    """

    matchers: list[Any]
    masks: Words
    is_over: Flags


def _filled(compiled: _Compiled, matchers: list[Any]) -> _Matchers:
    size, stop = len(compiled.tokens.texts), compiled.tokens.stop
    count = len(matchers)
    words = np.zeros((count + 1, -(-(size + 1) // 32)), np.int32)
    if matchers:
        compiled.library.fill(matchers, words[:count])
    is_complete = _bits(words, np.arange(count + 1), np.full(count + 1, size))
    words[:, size // 32] &= np.int32((1 << size % 32) - 1)  # no bit beyond the vocabulary
    masks = np.ascontiguousarray(words[:, : -(-size // 32)])
    is_over = is_complete & ~masks.any(1) & (not stop.size)
    for token_id in stop.tolist():
        bit = np.array(1 << token_id % 32, np.uint32).view(np.int32)
        masks[is_complete, token_id // 32] |= bit
    return _Matchers(matchers, masks, is_over)


def _bits(words: Words, rows: Integers64, token_ids: Integers64) -> Flags:
    """Return the bit of one token in each of some rows."""
    found: Flags = (words[rows, token_ids >> 5] >> (token_ids & 31).astype(np.int32) & 1) > 0
    return found


def _advanced(
    compiled: _Compiled, before: Future[_Matchers], parents: list[int], token_ids: list[int]
) -> _Matchers:
    """Fork matchers for the tokens that they accept; -1 keeps a matcher as it is."""
    known, library = before.result().matchers, compiled.library
    matchers = [
        known[parent] if token_id < 0 else library.accepted(known[parent], token_id)
        for parent, token_id in zip(parents, token_ids, strict=True)
    ]
    return _filled(compiled, matchers)


class _PendingMasks(NamedTuple):
    """The masks of states that the thread of the constraint computes."""

    states: Future[_Matchers]

    def result(self) -> torch.Tensor:
        return torch.from_numpy(self.states.result().masks)


class _Matched(Constraint):
    """The matcher of each member among those of the population's distinct histories."""

    def __init__(self, compiled: _Compiled, matcher: Any, size: int) -> None:
        self.compiled = compiled
        # One thread, so that a step is computed after the one before.
        self.thread = ThreadPoolExecutor(1, "genlm-grammar")
        self.state = self.thread.submit(_filled, compiled, [matcher])
        self.index = np.zeros(size, np.int64)
        self.log_potential = np.zeros(size)
        self.finished = np.zeros(size, np.bool_)
        self.finish_without_stop()

    def masks(self) -> tuple[torch.Tensor, Integers64]:
        """Return the masks of the distinct states; waits until they are filled."""
        return torch.from_numpy(self.state.result().masks), self.index

    async def draw(
        self, population: Population, *, temperature: float = 1.0, seed: int | None = None
    ) -> DrawnTokens:
        """Draw as `Constraint.draw`; the masks are filled while the model runs.

        Args:
            population: As `Constraint.draw`.
            temperature: As `Constraint.draw`.
            seed: As `Constraint.draw`.
        """
        dead = np.isneginf(self.log_potential) & ~population.finished.numpy() & ~self.finished
        drawn = await population.finish(self.finished | dead).draw(
            _PendingMasks(self.state),
            mask_index=self.index,
            temperature=temperature,
            seed=seed,
        )
        if dead.any():
            for column in drawn[1:]:
                column[torch.from_numpy(dead)] = -np.inf
        return drawn

    def advance(self, token_ids: IntegersLike) -> Self:
        """Find the distinct new states, and let another thread compute them."""
        ids = token_column(token_ids, len(self))
        size = len(self.compiled.tokens.texts)
        is_given = (ids >= 0) & ~self.finished
        is_allowed = is_given & _bits(self.state.result().masks, self.index, ids)
        is_stop = self.compiled.is_stop[ids]
        found = copy.copy(self)
        found.finished = self.finished | is_allowed & is_stop
        found.log_potential = np.where(is_given & ~is_allowed, -np.inf, self.log_potential)
        needs_state = ~found.finished & (found.log_potential > -np.inf)
        keys = self.index * (size + 1) + np.where(is_allowed, ids, size)
        distinct, index = np.unique(keys[needs_state], return_inverse=True)
        parents, tokens = np.divmod(distinct, size + 1)
        tokens[tokens == size] = -1
        found.index = np.full(len(self), len(distinct))
        found.index[needs_state] = index
        found.state = self.thread.submit(
            _advanced, self.compiled, self.state, parents.tolist(), tokens.tolist()
        )
        found.finish_without_stop()
        return found

    def finish_without_stop(self) -> None:
        """Finish members whose text is over, for models without an end of text."""
        if not self.compiled.tokens.stop.size:
            self.finished = self.finished | self.state.result().is_over[self.index]

    def __getitem__(self, ancestors: Any) -> Self:
        chosen = chosen_members(ancestors)
        found = copy.copy(self)
        found.index = self.index[chosen]
        found.finished = self.finished[chosen]
        found.log_potential = self.log_potential[chosen]
        return found
