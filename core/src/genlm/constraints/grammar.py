"""`Grammar`: context-free languages, with matchers of xgrammar or llguidance."""

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
        build = functools.partial(_compiled, library, form, source, options or {})
        self._compiled = PerVocabulary(build)

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
        return _Matched(compiled, matcher, size)

    def __repr__(self) -> str:
        return f"<Grammar of {self._form}, by {self._library}>"


class _Compiled(NamedTuple):
    """A grammar compiled for the tokens of a vocabulary."""

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
    """The distinct states of a population after a step; they are not changed afterwards.

    Attributes:
        matchers: One matcher per state.
        masks: Allowed tokens of each state, packed bits, and an empty mask as the last row for
            members without a state.
        is_over: Whether a state ends a text without a stop token: it is complete and has no
            continuation.
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
    """Return the bits of tokens in rows."""
    found: Flags = (words[rows, token_ids >> 5] >> (token_ids & 31).astype(np.int32) & 1) > 0
    return found


def _advanced(
    compiled: _Compiled, before: Future[_Matchers], parents: list[int], token_ids: list[int]
) -> _Matchers:
    """Fork matchers and let them accept tokens; -1 leaves a matcher unchanged."""
    known, library = before.result().matchers, compiled.library
    matchers = [
        known[parent] if token_id < 0 else library.accepted(known[parent], token_id)
        for parent, token_id in zip(parents, token_ids, strict=True)
    ]
    return _filled(compiled, matchers)


class _PendingMasks(NamedTuple):
    """Masks of states that the constraint's thread computes."""

    states: Future[_Matchers]

    def result(self) -> torch.Tensor:
        return torch.from_numpy(self.states.result().masks)


class _Matched(Constraint):
    """The matchers of members, shared by members with equal histories."""

    def __init__(self, compiled: _Compiled, matcher: Any, size: int) -> None:
        self.compiled = compiled
        # One thread, so that steps are computed in order.
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
        """Draw as `Constraint.draw`; the masks are filled while the model runs."""
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
        """Determine the distinct new states, which another thread computes."""
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
        """Finish members whose text has no continuation, for models without stop tokens."""
        if not self.compiled.tokens.stop.size:
            self.finished = self.finished | self.state.result().is_over[self.index]

    def __getitem__(self, ancestors: Any) -> Self:
        chosen = chosen_members(ancestors)
        found = copy.copy(self)
        found.index = self.index[chosen]
        found.finished = self.finished[chosen]
        found.log_potential = self.log_potential[chosen]
        return found
