"""`Python`: texts that a function accepts, which is called only for drawn tokens."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from genlm.constraints.automaton import utf8
from genlm.constraints.languages import Language
from genlm.constraints.protocol import Constraint, Flags, Integers64, attribute_values
from genlm.constraints.rejection import Search, above_0
from genlm.constraints.states import (
    DEAD,
    FINISHED,
    LIVE,
    StateConstraint,
    States,
    first_states,
    member_index,
)
from genlm.constraints.text_tokens import TextTokens, text_tokens
from genlm.core.base.blocking import is_blocking, raise_stop_iteration
from genlm.core.base.forking import renew_in_forks
from genlm.core.base.validation import checked_integer
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.sampling import SeedLike, checked_seeds

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.lm import AsyncLM
    from genlm.core.model.members import ArrayLike
    from genlm.core.model.population import Population
    from genlm.core.rows.row_masks import MasksLike

T = TypeVar("T")
Texts: TypeAlias = npt.NDArray[np.object_]

_FIRST_DRAWS = 8
"""Number of tokens drawn in the first round of the first step. Each further round draws four
times as many; the first round of a later step draws a few more than the step before needed."""


class Python(Language):
    """The set of texts that Python functions accept.

        no_repeats = Python(lambda text: len(set(text.split())) == len(text.split()))

    Tokens are drawn from the model without replacement until a token is accepted, so the
    functions are called for a few tokens of each member and not for the whole vocabulary. The
    mass of all accepted tokens, by which the weight of a particle is multiplied, is estimated
    without bias from a few additional draws: adaptive weighted rejection sampling, arXiv
    2504.05410.

    In an event loop, `draw` calls the functions on another thread, one call after the other.
    When it is cancelled, they are not called for further members. `advance` calls them on the
    calling thread, only for tokens that `draw` did not return.

    Without stop ids, texts end only where the texts of `within` do, for example those of
    `Automaton.regex(".{1,80}")`. A particle dies if no token after its text is accepted: the
    functions do not determine in advance whether a text has continuations.

    Args:
        prefix: Function of the bytes of a text that returns whether the text can be continued
            to an accepted text. If it is too permissive, particles die later. The last
            character of the text may be incomplete.
        complete: Function of the bytes of a text that returns whether the text may end there;
            by default `prefix`.
        within: Language that also contains the texts; tokens are drawn from its masks. By
            default the language of valid UTF-8.
        extra_draws: Number of tokens drawn after the accepted one to estimate the mass.
            A larger number reduces the variance of the weights.

    Raises:
        TypeError: `prefix` or `complete` is not callable. A draw raises it for a coroutine
            function, and for results that are neither true nor false, such as arrays.
        ValueError: `extra_draws` is below 1.
    """

    def __init__(
        self,
        prefix: Callable[[bytes], object],
        complete: Callable[[bytes], object] | None = None,
        *,
        within: Language | None = None,
        extra_draws: int = 2,
    ) -> None:
        self.prefix = prefix
        """Function that returns whether a text can be continued."""
        self.complete = prefix if complete is None else complete
        """Function that returns whether a text may end."""
        for function in (self.prefix, self.complete):
            if not callable(function):
                raise TypeError(f"expected a function of bytes; found {function!r}")
        if not isinstance(within, Language | None):
            raise TypeError(f"within={within!r}; expected a Language, such as a Grammar")
        self._within = utf8() if within is None else within
        self.extra_draws = checked_integer("extra_draws", extra_draws, 1)
        """Number of tokens drawn after the accepted one."""
        self.lock = threading.Lock()
        """Held while one of the functions is called; never two are called at the same time."""
        self._after_fork()
        renew_in_forks(self)

    def _after_fork(self) -> None:
        self._thread = ThreadPoolExecutor(1, "genlm-python")

    def off_thread(self, function: Callable[[T], object]) -> Callable[[T], Future[Any]]:
        """Return a function that submits calls of `function` to the language's thread."""
        run = contextvars.copy_context().run
        return functools.partial(self._thread.submit, run, raise_stop_iteration, function)  # type: ignore[arg-type]

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`."""
        within = self._within.start(llm, size, text=text, stop=stop)
        texts = np.empty(size, object)
        texts.fill(bytes(text))
        tokens = text_tokens.get(llm.vocabulary, stop)
        return PythonConstraint(self, tokens, within, texts, first_states(size))

    def _restricted_to(self, other: Language) -> Python:
        """Draw tokens from the other language's masks, or test them by its functions, too."""
        prefix, complete, within = self.prefix, self.complete, other
        if isinstance(other, Python):
            prefix = functools.partial(_both_accept, other.prefix, prefix)
            complete = functools.partial(_both_accept, other.complete, complete)
            within = other._within  # noqa: SLF001 - of the same class
        if self._within is not utf8():
            within = self._within if within is utf8() else within & self._within
        return Python(prefix, complete, within=within, extra_draws=self.extra_draws)

    def __and__(self, other: Language) -> Language:
        return self._restricted_to(other) if isinstance(other, Language) else NotImplemented

    def __reduce__(self) -> Any:
        create = functools.partial(
            type(self), within=self._within, extra_draws=self.extra_draws
        )
        return create, (self.prefix, self.complete)

    def __repr__(self) -> str:
        name = getattr(self.prefix, "__name__", repr(self.prefix))
        return f"<Python {name} within {self._within!r}>"


def _both_accept(
    first: Callable[[bytes], object], second: Callable[[bytes], object], text: bytes
) -> bool:
    return _verdict(first, text) and _verdict(second, text)


def _verdict(function: Callable[[bytes], object], text: bytes) -> bool:
    """Return whether a function accepts a text.

    Raises:
        Exception: The error of the function, with the text in a note.
        TypeError: The result of the function is neither true nor false.
    """
    try:
        result = function(text)
    except Exception as error:
        error.add_note(f"{function!r} was called with {text!r}")
        raise
    if isinstance(result, CoroutineType):
        result.close()
        raise TypeError(
            f"{function!r} is a coroutine function; expected a function that returns "
            f"whether it accepts bytes. It may call methods of models such as score_sync"
        )
    try:
        return bool(result)
    except (ValueError, RuntimeError) as error:  # an array or a tensor
        raise TypeError(
            f"{function!r} returned {type(result).__name__}, which is neither true nor "
            f"false ({error}); expected a function that returns whether it accepts bytes"
        ) from error


class PythonConstraint(StateConstraint):
    """The texts of members, and the constraint from whose masks tokens are drawn.

    The states distinguish only live, dead and finished members.

    Args:
        language: The functions.
        tokens: Texts of tokens.
        within: Constraint from whose masks tokens are drawn.
        texts: Text of each member, shape `(n,)`.
        states: State of each member.
        first_draws: Number of tokens drawn in the first round of the next step, if it is more
            than one token and the additional draws.
    """

    def __init__(
        self,
        language: Python,
        tokens: TextTokens,
        within: Constraint,
        texts: Texts,
        states: States,
        *,
        first_draws: int = _FIRST_DRAWS,
    ) -> None:
        super().__init__(states, len(tokens.texts))
        self.language = language
        self.tokens = tokens
        self.within = within
        self.texts = texts
        self.first_draws = first_draws
        self.verdicts: tuple[dict[bytes, bool], dict[bytes, bool]] = {}, {}
        """Results of `prefix` and of `complete` by text, so that each text is tested once."""

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the masks from which tokens are drawn before the function is called."""
        return self.within.masks()

    def _draw_masks(self) -> tuple[MasksLike, Integers64 | None]:
        return self.within._draw_masks()  # noqa: SLF001 - of the same package

    def _after(self, token_ids: Integers64, *, are_drawn: bool = False) -> PythonConstraint:
        """Append tokens to the texts. Tokens that were tested are not tested again."""
        return self.with_tokens(token_ids, self.first_draws, are_drawn=are_drawn)

    def with_tokens(
        self, ids: Integers64, first_draws: int, *, are_drawn: bool
    ) -> PythonConstraint:
        """Append tokens to the texts; the next step draws `first_draws` tokens at first."""
        within = self.within.advance(ids)
        is_new = (ids >= 0) & (self.states == LIVE)
        members = np.flatnonzero(is_new)
        is_accepted = ~is_new
        is_accepted[members] = are_drawn or self.test_tokens(members, ids[members, None])[:, 0]
        texts, pieces = self.texts.copy(), self.tokens.texts
        extended = np.empty(len(members), object)
        pairs = zip(texts[members].tolist(), ids[members].tolist(), strict=True)
        extended[:] = [text + pieces[token_id] for text, token_id in pairs]
        texts[members] = extended
        states = np.where(is_accepted, self.states, DEAD)
        states[is_new & self.tokens.is_stop[ids] & is_accepted] = FINISHED
        states[is_new & np.isneginf(attribute_values(within, "log_potential"))] = DEAD
        complete = self.language.complete
        is_over = attribute_values(within, "finished")
        for member in np.flatnonzero(is_over & (states == LIVE)).tolist():
            with self.language.lock:
                states[member] = FINISHED if _verdict(complete, texts[member]) else DEAD
        return PythonConstraint(
            self.language, self.tokens, within, texts, states, first_draws=first_draws
        )

    def test_tokens(
        self,
        members: Integers64,
        token_ids: Integers64,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Flags:
        """Return whether the texts of members may continue, or end, with tokens.

        Args:
            members: Members, shape `(m,)`.
            token_ids: Tokens of each of these members, shape `(m, k)`; -1 for no token.
            is_cancelled: Returns whether the draw was cancelled; called before each member. If
                so, the functions are not called for it and later members.
        """
        pieces, (may_continue, may_end) = self.tokens.texts, self.verdicts
        prefix, complete, flags = self.language.prefix, self.language.complete, []
        for text, ids in zip(self.texts[members].tolist(), token_ids.tolist(), strict=True):
            if is_cancelled():
                return np.zeros_like(token_ids, np.bool_)
            with self.language.lock:
                for token_id in ids:
                    if token_id >= 0 and (piece := pieces[token_id]):
                        extended = text + piece
                        flag = may_continue.get(extended)
                        if flag is None:
                            flag = may_continue[extended] = _verdict(prefix, extended)
                    elif self.tokens.is_stop[token_id]:
                        flag = may_end.get(text)
                        if flag is None:
                            flag = may_end[text] = _verdict(complete, text)
                    else:
                        flag = False
                    flags.append(flag)
        return np.array(flags, np.bool_).reshape(token_ids.shape)

    def __getitem__(self, ancestors: Any) -> PythonConstraint:
        index = member_index(ancestors)
        return PythonConstraint(
            self.language,
            self.tokens,
            self.within[index],
            self.texts[index],
            self.states[index],
            first_draws=self.first_draws,
        )

    async def draw(
        self,
        population: Population,
        *,
        temperature: float = 1.0,
        bias: ArrayLike = 0.0,
        seed: SeedLike = None,
    ) -> DrawnTokens:
        """Draw tokens without replacement until the functions accept one for each member.

        Returns:
            As `Constraint.draw`; `log_mass` is the log of an unbiased estimate, and at
            temperature 0 the log-probability of the token plus its bias.
        """
        settings = self._draw_settings(population, temperature=above_0(temperature), bias=bias)
        search = Search(self, settings)
        checked = checked_seeds(seed, len(population))
        take: Callable[[DrawnTokens], Any] = search.take
        if not is_blocking():
            take = self.language.off_thread(take)
        minimum, most = 1 + self.language.extra_draws, len(self.tokens.texts) + 1
        count, result = min(max(minimum, self.first_draws), most), None
        try:
            while result is None:
                # More draws by one seed begin with the same tokens.
                result = await population._draw(  # noqa: SLF001 - internal to genlm
                    search.settings, checked, count, take
                )
                count = min(4 * count, most)
        finally:
            search.is_cancelled = True
        drawn: DrawnTokens = result
        return drawn
