"""`Python`: texts that a function accepts, which is called only for drawn tokens."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.constraints.automaton import utf8
from genlm.constraints.protocol import (
    Constraint,
    Flags,
    Integers64,
    IntegersLike,
    Language,
)
from genlm.constraints.rejection import estimates
from genlm.constraints.states import (
    DEAD,
    FINISHED,
    LIVE,
    StateConstraint,
    States,
    chosen_members,
    token_column,
)
from genlm.constraints.text_tokens import TextTokens, text_tokens
from genlm.core.base.blocking import off_loop
from genlm.core.base.forking import renew_in_forks
from genlm.core.base.validation import checked_integer
from genlm.core.model.population import DrawnTokens

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.model.lm import AsyncLM
    from genlm.core.model.population import Population
    from genlm.core.rows.row_masks import MasksLike

__all__ = ["Python"]

Texts: TypeAlias = npt.NDArray[np.object_]

_FIRST_DRAWS = 8
"""Number of tokens drawn in the first round of the first step. Each further round draws four
times as many; the first round of a later step draws as many as the step before needed."""
_MAX_FIRST_DRAWS = 32
"""Maximum number of tokens drawn in the first round of a step."""


class Python(Language):
    """The texts that functions accept.

        no_repeats = Python(lambda text: len(set(text.split())) == len(text.split()))

    Tokens are drawn from the model without replacement until one is accepted, so the functions
    are called for a few tokens of each member and not for the whole vocabulary. The mass of all
    accepted tokens, by which the weight of a particle is multiplied, is estimated without bias
    from a few additional draws: adaptive weighted rejection sampling, arXiv 2504.05410.

    In an event loop, `draw` calls the functions on another thread, one call after the other.
    When it is cancelled, they are not called for further members. `advance` calls them on the
    calling thread, only for tokens that `draw` did not return.

    Args:
        prefix: Function of the bytes of a text that returns whether the text can be continued
            to an accepted one. If it is too permissive, particles die later. The last character
            of the text may be incomplete.
        complete: Function of the bytes of a text that returns whether the text may end there;
            by default `prefix`.
        within: Language that also contains the texts; tokens are drawn from its masks. By
            default the language of valid UTF-8.
        extra_draws: Number of tokens drawn after the accepted one to estimate the mass. A
            larger number reduces the variance of the weights.

    Raises:
        TypeError: `prefix` or `complete` is not callable.
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
        self._within = utf8() if within is None else within
        self.extra_draws = checked_integer("extra_draws", extra_draws, 1)
        """Number of tokens drawn after the accepted one."""
        self._lock = threading.Lock()
        renew_in_forks(self)

    def _call(self, function: Callable[[bytes], object], text: bytes) -> bool:
        """Call one of the functions; never two of this language at the same time."""
        with self._lock:
            return bool(function(text))

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`."""
        within = self._within.start(llm, size, text=text, stop=stop)
        texts = np.empty(size, object)
        texts.fill(text)
        tokens = text_tokens.get(llm.vocabulary, stop)
        return _Tested(self, tokens, within, texts, np.full(size, LIVE))

    def __repr__(self) -> str:
        name = getattr(self.prefix, "__name__", repr(self.prefix))
        return f"<Python {name} within {self._within!r}>"


class _Tested(StateConstraint):
    """The texts of members, and the constraint from whose masks tokens are drawn.

    The states tell only live, dead and finished members apart.

    Args:
        language: The functions.
        tokens: Texts of tokens.
        within: Constraint from whose masks tokens are drawn.
        texts: Text of each member, shape `(n,)`.
        states: State of each member.
        first_draws: Number of tokens drawn in the first round of the next step.
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
        super().__init__(states)
        self.language = language
        self._call = language._call  # noqa: SLF001 - of the same module
        self.tokens = tokens
        self.within = within
        self.texts = texts
        self.first_draws = first_draws
        self.known: tuple[dict[bytes, bool], dict[bytes, bool]] = {}, {}
        """Whether texts may continue, and whether they may end; tested once."""
        self.accepted: _Accepted | None = None
        """The tokens of the last draw."""

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the masks from which tokens are drawn before the function is called."""
        return self.within.masks()

    def advance(self, token_ids: IntegersLike) -> _Tested:
        """Append tokens to the texts. Drawn tokens are not tested again."""
        ids = token_column(token_ids, len(self), len(self.tokens.texts))
        within, accepted = self.within.advance(ids), self.accepted
        is_new = (ids >= 0) & (self.states == LIVE)
        is_tested = np.zeros(len(ids), np.bool_)
        texts, states, first_draws = self.texts.copy(), self.states.copy(), self.first_draws
        if accepted is not None:
            first_draws = accepted.draws
            is_tested = ids == accepted.token_ids
            np.copyto(texts, accepted.texts, where=is_tested)
        states[is_new & self.tokens.is_stop[ids]] = FINISHED
        others = np.flatnonzero(is_new & ~is_tested)
        if others.size:
            is_accepted = self.tested(others, ids[others, None])[:, 0]
            states[others[~is_accepted]] = DEAD
            texts[others] = self.grown(others, ids)
        states[is_new & np.isneginf(within.log_potential)] = DEAD
        complete = self.language.complete
        for member in np.flatnonzero(within.finished & (states == LIVE)).tolist():
            states[member] = FINISHED if self._call(complete, texts[member]) else DEAD
        return _Tested(
            self.language, self.tokens, within, texts, states, first_draws=first_draws
        )

    def grown(self, members: Integers64, token_ids: Integers64) -> Texts:
        """Return the texts of some members after the token of each.

        Args:
            members: Members, shape `(m,)`.
            token_ids: Tokens of all members, shape `(n,)`; -1 for none.
        """
        pieces, found = self.tokens.texts, np.empty(len(members), object)
        pairs = zip(self.texts[members].tolist(), token_ids[members].tolist(), strict=True)
        found[:] = [text + pieces[token] if token >= 0 else text for text, token in pairs]
        return found

    def tested(
        self,
        members: Integers64,
        token_ids: Integers64,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Flags:
        """Return whether the texts of members may continue, or end, with tokens.

        Args:
            members: Members, shape `(m,)`.
            token_ids: Tokens of each of them, shape `(m, k)`; -1 for none.
            is_cancelled: Called before each member: whether the result is no longer needed.
                The functions are then not called again.
        """
        pieces, (known, known_ends) = self.tokens.texts, self.known
        prefix, complete, flags = self.language.prefix, self.language.complete, []
        for text, ids in zip(self.texts[members].tolist(), token_ids.tolist(), strict=True):
            if is_cancelled():
                return np.zeros_like(token_ids, np.bool_)
            for token_id in ids:
                if token_id >= 0 and (piece := pieces[token_id]):
                    grown = text + piece
                    flag = known.get(grown)
                    if flag is None:
                        flag = known[grown] = self._call(prefix, grown)
                elif self.tokens.is_stop[token_id]:
                    flag = known_ends.get(text)
                    if flag is None:
                        flag = known_ends[text] = self._call(complete, text)
                else:
                    flag = False
                flags.append(flag)
        return np.array(flags, np.bool_).reshape(token_ids.shape)

    def __getitem__(self, ancestors: Any) -> _Tested:
        chosen = chosen_members(ancestors)
        return _Tested(
            self.language,
            self.tokens,
            self.within[chosen],
            self.texts[chosen],
            self.states[chosen],
            first_draws=self.first_draws,
        )

    async def draw(
        self, population: Population, *, temperature: float = 1.0, seed: int | None = None
    ) -> DrawnTokens:
        """Draw tokens without replacement until the functions accept one for each member.

        Returns:
            As `Constraint.draw`; `log_mass` is the log of an unbiased estimate.
        """
        is_active = ~population.finished.numpy() & (self.states != FINISHED)
        search = _Search(self, is_active)
        masks, index = self.within._draw_masks()  # noqa: SLF001 - of the same package
        seed = secrets.randbits(63) if seed is None else seed
        count, found = self.first_draws, search.result()
        try:
            while found is None:
                # More draws by one seed begin with the same tokens.
                drawn = await population.finish(search.is_over).draw_without_replacement(
                    count, masks, mask_index=index, temperature=temperature, seed=seed
                )
                found = await off_loop(search.take, drawn)
                count = min(4 * count, len(self.tokens.texts) + 1)
        finally:
            search.is_cancelled = True
        drawn, self.accepted = found
        return drawn


class _Accepted(NamedTuple):
    """Accepted tokens of a draw.

    Attributes:
        token_ids: A token of each member; -1 for none.
        texts: Text of each member after its token.
        draws: Number of draws of the first round of the next step.
    """

    token_ids: Integers64
    texts: Texts
    draws: int


class _Search:
    """The draws of one step for all members, until each has an accepted token.

    Attributes:
        is_over: Whether a member needs no further draw.
        is_cancelled: Whether nobody waits for the result.
    """

    def __init__(self, constraint: _Tested, is_active: Flags) -> None:
        size = len(is_active)
        self.is_over = ~is_active | (constraint.states == DEAD)
        self.is_cancelled = False
        self._constraint = constraint
        self._is_active = is_active
        self._place = np.full(size, -1)  # of the first accepted draw
        self._extra = np.full(size, constraint.language.extra_draws)
        # The draws so far, shape (n, k), and the number of those that are tested.
        self._done = 0
        self._token_ids = np.full((size, 1), -1)
        self._logprobs, self._draw_logprobs = np.full((2, size, 1), -np.inf)
        self._is_accepted = np.zeros((size, 1), np.bool_)

    def take(self, drawn: DrawnTokens) -> tuple[DrawnTokens, _Accepted] | None:
        """Test the draws of members that are not over, in order, after those before.

        Returns:
            As `result`.
        """
        count = drawn.token_ids.shape[1]
        is_left = ~self.is_over[:, None]
        self._token_ids = _widened(self._token_ids, count, -1)
        self._logprobs = _widened(self._logprobs, count, -np.inf)
        self._draw_logprobs = _widened(self._draw_logprobs, count, -np.inf)
        self._is_accepted = _widened(self._is_accepted, count, False)
        np.copyto(self._token_ids, drawn.token_ids.numpy(), where=is_left)
        np.copyto(self._logprobs, drawn.logprobs.numpy(), where=is_left)
        np.copyto(self._draw_logprobs, drawn.draw_logprob.numpy(), where=is_left)
        # An estimate uses at least these draws.
        end = min(1 + self._constraint.language.extra_draws, count)
        while self._done < count and not self.is_over.all() and not self.is_cancelled:
            members = np.flatnonzero(~self.is_over)
            tokens = self._token_ids[members, self._done : max(end, self._done + 1)]
            flags = self._constraint.tested(members, tokens, lambda: self.is_cancelled)
            self._is_accepted[members, self._done : self._done + tokens.shape[1]] = flags
            self._done += tokens.shape[1]
            self._update(members, count)
        self._done = count
        return self.result()

    def _update(self, members: Integers64, count: int) -> None:
        """Determine which of the members are over after the tested draws."""
        new = members[self._place[members] < 0]
        accepted = self._is_accepted[new]
        new, accepted = new[accepted.any(1)], accepted[accepted.any(1)]
        self._place[new] = accepted.argmax(1)
        at_hand = count - 1 - self._place[new]  # if any, the estimate uses no further round
        extra = self._extra[new]
        self._extra[new] = np.where(at_hand > 0, np.minimum(extra, at_hand), extra)
        first = self._place[members]
        is_complete = (first >= 0) & (first + self._extra[members] < self._done)
        is_last = self._token_ids[members, self._done - 1] < 0
        self.is_over[members] = is_complete | is_last

    def result(self) -> tuple[DrawnTokens, _Accepted] | None:
        """Return the accepted tokens with their weights; None if a member needs more draws."""
        if not self.is_over.all():
            return None
        constraint, token_ids = self._constraint, self._first(self._token_ids, -1)
        least = 1 + constraint.language.extra_draws
        needed = int(self._place.max(initial=-1)) + least
        draws = min(max(least, needed), max(least, _MAX_FIRST_DRAWS))
        texts = constraint.grown(np.arange(len(token_ids)), token_ids)
        found = estimates(self._draw_logprobs, self._is_accepted, self._place, self._extra)
        is_drawn = self._place >= 0
        logprobs = np.where(self._is_active & ~is_drawn, -np.inf, 0.0)
        log_weights, draw_logprobs = logprobs.copy(), logprobs.copy()
        logprobs[is_drawn] = self._first(self._logprobs, 0.0)[is_drawn]
        ratios = found.log_mass[is_drawn] - found.log_probability[is_drawn]
        log_weights[is_drawn] = logprobs[is_drawn] + ratios
        draw_logprobs[is_drawn] = -ratios
        columns = logprobs, log_weights, draw_logprobs
        drawn = DrawnTokens(
            torch.from_numpy(token_ids.copy()),
            *(torch.from_numpy(each).float() for each in columns),
        )
        return drawn, _Accepted(token_ids, texts, draws)

    def _first(self, values: npt.NDArray[Any], otherwise: float) -> npt.NDArray[Any]:
        """Return the value of each member's first accepted draw."""
        found = values[np.arange(len(values)), self._place]
        return np.where(self._place < 0, otherwise, found)


def _widened(values: npt.NDArray[Any], count: int, otherwise: float) -> npt.NDArray[Any]:
    """Return values of shape `(n, k)` with more columns."""
    found = np.full((len(values), count), otherwise, values.dtype)
    found[:, : values.shape[1]] = values[:, :count]
    return found
