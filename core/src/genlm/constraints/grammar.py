"""`Grammar`: context-free languages, with matchers of xgrammar or llguidance."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from genlm.constraints.languages import Language
from genlm.constraints.matchers import (
    LIBRARIES,
    GrammarSource,
    MatcherLibrary,
    MatcherState,
    Words,
)
from genlm.constraints.protocol import Constraint, Flags, Integers64
from genlm.constraints.states import (
    DEAD,
    FINISHED,
    LIVE,
    StateConstraint,
    States,
    check_text,
    first_states,
    member_index,
)
from genlm.core.model.lm import AsyncLM, checked_model
from genlm.core.rows.row_masks import RowMasks
from genlm.core.vocab.per_vocabulary import PerVocabulary

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers


class Grammar(Language):
    """A context-free language, created with `json_schema`, `ebnf` or `lark`.

    A population has one matcher of the library for each distinct history of its members. After
    each step, matchers accept their tokens, copied where a history has several continuations,
    and one call of the library, on another thread, fills all masks. The libraries allow every
    token that begins a text of the language in bytes; unlike `Automaton`, they do not test
    whether the tokens of the vocabulary can complete it. A particle may die if the vocabulary
    lacks bytes, or a stop token has them.

    Raises:
        ValueError: `library` has another value, or the library rejects the grammar.
        MissingRequirementError: The library is not installed.
    """

    def __init__(
        self, library: str, form: str, source: Any, options: Mapping[str, Any] | None = None
    ) -> None:
        supporting = [name for name, kind in LIBRARIES.items() if form in kind.formats]
        if library not in supporting:
            raise ValueError(
                f"library={library!r} for {form}; expected one of {', '.join(supporting)}"
            )
        self._library = library
        self._source = GrammarSource(form, source, dict(options or {}))
        LIBRARIES[library].check(self._source)
        self._compiled = PerVocabulary(functools.partial(LIBRARIES[library], self._source))

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any], *, library: str = "xgrammar", **options: Any
    ) -> Grammar:
        """Return the language of the JSON documents that are valid under a schema.

        The language is the one that the library derives. In strings whose length is limited by
        `minLength` or `maxLength`, xgrammar 0.2 accepts control characters, which parsers of
        JSON reject, and no escapes such as a backslash before a quotation mark. llguidance
        rejects the former and accepts the latter.

        Args:
            schema: The schema as text or as a mapping.
            library: `"xgrammar"` or `"llguidance"`.
            **options: Options of the library's compiler. White space is unrestricted by
                default, and limited to single spaces with `any_whitespace=False` for xgrammar,
                `whitespace_flexible=False` for llguidance.

        Raises:
            ValueError: `library` has another value, or it rejects the schema.
            MissingRequirementError: The library is not installed.
        """
        return cls(library, "json_schema", schema, options)

    @classmethod
    def ebnf(cls, grammar: str, *, root: str = "root") -> Grammar:
        """Return the language of a grammar in xgrammar's EBNF, which is GBNF.

        Args:
            grammar: Rules such as `root ::= "yes" | "no"`.
            root: Name of the start rule.

        Raises:
            ValueError: xgrammar rejects the grammar.
            TypeError: `grammar` or `root` is not a text.
            MissingRequirementError: xgrammar is not installed.
        """
        _check_texts(grammar=grammar, root=root)
        return cls("xgrammar", "ebnf", grammar, {"root_rule_name": root})

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return the language of a grammar in llguidance's variant of Lark.

        llguidance divides a text into terminals, each as long as possible: the language of
        `start: ("a" | "ab") "b"` contains "abb" but not "ab".

        Args:
            grammar: Rules such as `start: "yes" | "no"`.

        Raises:
            ValueError: llguidance rejects the grammar.
            TypeError: `grammar` is not a text.
            MissingRequirementError: llguidance is not installed.
        """
        _check_texts(grammar=grammar)
        return cls("llguidance", "lark", grammar)

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`.

        For llguidance, `text` must be valid UTF-8.

        Raises:
            ValueError: As `Language.start`, or the library cannot compile the grammar.
        """
        check_text(text)
        states = first_states(size)
        compiled = self._compiled.get(checked_model(llm).vocabulary, stop)
        first = compiled.first(text)
        if first is None:
            raise ValueError(f"no text of {self!r} begins with {text!r}")
        thread = ThreadPoolExecutor(1, "genlm-grammar")
        step = thread.submit(_fill_masks, compiled, [first], states)
        return _GrammarConstraint(compiled, thread, step, _ended(compiled, step, states))

    def __reduce__(self) -> Any:
        return type(self), (self._library, *self._source)

    def __repr__(self) -> str:
        return f"<Grammar of {self._source.form}, by {self._library}>"


class _Step(NamedTuple):
    """The distinct states of a population after a step; not changed afterwards.

    Attributes:
        matchers: State of the matcher of each distinct live state, in the order of the states.
        masks: Allowed tokens of all states, packed bits; empty for dead and finished members.
        row_masks: The mask of each member.
        is_complete: Whether the text of each state may end.
    """

    matchers: list[MatcherState]
    masks: Words
    row_masks: RowMasks
    is_complete: Flags


def _fill_masks(
    compiled: MatcherLibrary, matchers: list[MatcherState], state_of: Integers64
) -> _Step:
    """Compute a step from the matchers of states, and the state of each member."""
    size, stop = len(compiled.tokens.texts), compiled.tokens.stop
    words = np.zeros((LIVE + len(matchers), size // 32 + 1), np.int32)
    if matchers:
        compiled.fill(matchers, words[LIVE:])
    last, end = words[:, size // 32], size % 32
    is_complete = (last >> end & 1).astype(np.bool_)
    last &= (1 << end) - 1  # no bit beyond the vocabulary
    masks = np.ascontiguousarray(words[:, : -(-size // 32)])
    for token_id in stop.tolist():
        bit = np.array(1 << token_id % 32, np.uint32).view(np.int32)
        masks[is_complete, token_id // 32] |= bit
    row_masks = RowMasks.of_bits(masks, size, state_of)
    return _Step(matchers, masks, row_masks, is_complete)


def _bits(words: Words, rows: Integers64, token_ids: Integers64) -> Flags:
    """Return the bits of tokens in rows."""
    bits: Flags = (words[rows, token_ids >> 5] >> (token_ids & 31).astype(np.int32) & 1) > 0
    return bits


def _advance_matchers(
    before: _GrammarConstraint, token_ids: Integers64, states: States
) -> _Step:
    """Let matchers accept tokens.

    Args:
        before: The members before the step.
        token_ids: Token of each member, or -1.
        states: Whether each member is dead, finished or live after the step.
    """
    compiled, parents = before.compiled, before.step.result().matchers
    place_of: dict[tuple[int, int], int] = {}
    members = zip(states.tolist(), before.state_of.tolist(), token_ids.tolist(), strict=True)
    places = [
        state if state < LIVE else place_of.setdefault((parent, token_id), LIVE + len(place_of))
        for state, parent, token_id in members
    ]
    matchers = compiled.after(
        [parents[parent - LIVE] for parent, _ in place_of],
        [token_id for _, token_id in place_of],
    )
    return _fill_masks(compiled, matchers, np.array(places, np.int64))


def _ended(compiled: MatcherLibrary, step: Future[_Step], states: States) -> States:
    """Finish members whose text has no continuation, for models without stop tokens."""
    if compiled.tokens.stop.size:
        return states
    _, masks, row_masks, is_complete = step.result()
    is_over = is_complete & ~masks.any(1)
    return np.where(is_over[row_masks.places.numpy()], FINISHED, states)


class _GrammarConstraint(StateConstraint):
    """Members with matchers, which members with equal histories share.

    The states distinguish only live, dead and finished members. One thread computes the
    matchers and masks of all steps in order.

    Args:
        compiled: The grammar.
        thread: The thread.
        step: Matchers and masks.
        states: State of each member.
        row_masks: The mask of each member, by default that of the step.
    """

    def __init__(
        self,
        compiled: MatcherLibrary,
        thread: ThreadPoolExecutor,
        step: Future[_Step],
        states: States,
        row_masks: RowMasks | None = None,
    ) -> None:
        super().__init__(states, len(compiled.tokens.texts))
        self.compiled = compiled
        self.thread = thread
        self.step = step
        self._row_masks = row_masks or RowMasks.deferred(
            lambda: step.result().row_masks, len(states)
        )

    @property
    def state_of(self) -> Integers64:
        """Distinct state of each member; waits for the step."""
        state_of: Integers64 = self._row_masks.places.numpy()
        return state_of

    def _after(self, token_ids: Integers64, *, are_drawn: bool = False) -> _GrammarConstraint:
        """Determine which members are finished or dead; the thread computes the masks."""
        states, is_stop = self.states, self.compiled.tokens.is_stop[token_ids]
        if np.logical_or.reduce(is_stop):
            states = np.where(is_stop & (states == LIVE), FINISHED, states)
        if not are_drawn:
            is_allowed = _bits(self.step.result().masks, self.state_of, token_ids)
            is_wrong = (token_ids >= 0) & ~is_allowed & (self.states == LIVE)
            states = np.where(is_wrong, DEAD, states)
        step = self.thread.submit(_advance_matchers, self, token_ids, states)
        states = _ended(self.compiled, step, states)
        return _GrammarConstraint(self.compiled, self.thread, step, states)

    def __getitem__(self, ancestors: Any) -> _GrammarConstraint:
        members = np.arange(len(self.states))[member_index(ancestors)]
        return _GrammarConstraint(
            self.compiled,
            self.thread,
            self.step,
            self.states[members],
            self._row_masks.of(members),
        )


def _check_texts(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}; expected a text")
