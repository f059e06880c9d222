"""`Python`: texts that a function accepts, which is called only for drawn tokens."""

from __future__ import annotations

import secrets
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
        is_accepted, first_draws = ~is_new, self.first_draws
        if accepted is not None:
            first_draws = accepted.draws
            is_accepted |= ids == accepted.token_ids
        if not is_accepted.all():
            members = np.flatnonzero(~is_accepted)
            is_accepted[members] = self.tested(members, ids[members, None])[:, 0]
        texts = self.texts.copy()
        pieces = self.tokens.texts
        grown = [
            text + pieces[token_id]
            for text, token_id in zip(texts[is_new].tolist(), ids[is_new].tolist(), strict=True)
        ]
        texts[is_new] = np.array([*grown, None], object)[:-1]
        states = np.where(is_accepted, self.states, DEAD)
        states[is_new & self.tokens.is_stop[ids] & is_accepted] = FINISHED
        states[is_new & np.isneginf(within.log_potential)] = DEAD
        for member in np.flatnonzero(within.finished & (states == LIVE)).tolist():
            states[member] = FINISHED if self.language.complete(texts[member]) else DEAD
        return _Tested(
            self.language, self.tokens, within, texts, states, first_draws=first_draws
        )

    def tested(self, members: Integers64, token_ids: Integers64) -> Flags:
        """Return whether the texts of members may continue, or end, with tokens.

        Args:
            members: Members, shape `(m,)`.
            token_ids: Tokens of each of them, shape `(m, k)`; -1 for none.
        """
        pieces, (known, known_ends) = self.tokens.texts, self.known
        prefix, complete = self.language.prefix, self.language.complete
        flags = []
        for text, ids in zip(self.texts[members].tolist(), token_ids.tolist(), strict=True):
            for token_id in ids:
                if token_id >= 0 and (piece := pieces[token_id]):
                    grown = text + piece
                    flag = known.get(grown)
                    if flag is None:
                        flag = known[grown] = bool(prefix(grown))
                elif self.tokens.is_stop[token_id]:
                    flag = known_ends.get(text)
                    if flag is None:
                        flag = known_ends[text] = bool(complete(text))
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
        """Draw tokens without replacement until the function accepts one for each member.

        Returns:
            As `Constraint.draw`; `log_mass` is the log of an unbiased estimate.
        """
        is_active = ~population.finished.numpy() & (self.states != FINISHED)
        search = _Search(self, is_active)
        masks, index = self.within._draw_masks()  # noqa: SLF001 - of the same package
        seed = secrets.randbits(63) if seed is None else seed
        count = self.first_draws
        while not search.is_over.all():
            # More draws by one seed begin with the same tokens.
            drawn = await population.finish(search.is_over).draw_without_replacement(
                count, masks, mask_index=index, temperature=temperature, seed=seed
            )
            search.take(drawn)
            count = min(4 * count, len(self.tokens.texts) + 1)
        self.accepted = search.accepted()
        return search.drawn()


class _Accepted(NamedTuple):
    """Accepted tokens of a draw.

    Attributes:
        token_ids: A token of each member; -1 for none.
        draws: Number of draws of the first round of the next step.
    """

    token_ids: Integers64
    draws: int


class _Search:
    """The draws of one step for all members, until each has an accepted token.

    Attributes:
        is_over: Whether a member needs no further draw.
    """

    def __init__(self, constraint: _Tested, is_active: Flags) -> None:
        size = len(is_active)
        self.is_over = ~is_active | (constraint.states == DEAD)
        self._constraint = constraint
        self._is_active = is_active
        self._place = np.full(size, -1)  # of the first accepted draw
        self._extra = np.full(size, constraint.language.extra_draws)
        # The draws so far, shape (n, k), and the number of those that are tested.
        self._done = 0
        self._token_ids = np.full((size, 1), -1)
        self._logprobs, self._draw_logprobs = np.full((2, size, 1), -np.inf)
        self._is_accepted = np.zeros((size, 1), np.bool_)

    def take(self, drawn: DrawnTokens) -> None:
        """Test the draws of members that are not over, in order, after those before."""
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
        while self._done < count and not self.is_over.all():
            members = np.flatnonzero(~self.is_over)
            tokens = self._token_ids[members, self._done : max(end, self._done + 1)]
            flags = self._constraint.tested(members, tokens)
            self._is_accepted[members, self._done : self._done + tokens.shape[1]] = flags
            self._done += tokens.shape[1]
            self._update(members, count)
        self._done = count

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

    def accepted(self) -> _Accepted:
        """Return the accepted tokens, and the number of draws for the next step."""
        least = 1 + self._constraint.language.extra_draws
        needed = int(self._place.max(initial=-1)) + least
        draws = min(max(least, needed), max(least, _MAX_FIRST_DRAWS))
        return _Accepted(self._first(self._token_ids, -1), draws)

    def drawn(self) -> DrawnTokens:
        """Return the accepted tokens of the members, with their weights."""
        found = estimates(self._draw_logprobs, self._is_accepted, self._place, self._extra)
        is_drawn = self._place >= 0
        logprobs = np.where(self._is_active & ~is_drawn, -np.inf, 0.0)
        log_weights, draw_logprobs = logprobs.copy(), logprobs.copy()
        logprobs[is_drawn] = self._first(self._logprobs, 0.0)[is_drawn]
        ratios = found.log_mass[is_drawn] - found.log_probability[is_drawn]
        log_weights[is_drawn] = logprobs[is_drawn] + ratios
        draw_logprobs[is_drawn] = -ratios
        columns = logprobs, log_weights, draw_logprobs
        return DrawnTokens(
            torch.from_numpy(self._first(self._token_ids, -1)),
            *(torch.from_numpy(each).float() for each in columns),
        )

    def _first(self, values: npt.NDArray[Any], otherwise: float) -> npt.NDArray[Any]:
        """Return the value of each member's first accepted draw."""
        found = values[np.arange(len(values)), self._place]
        return np.where(self._place < 0, otherwise, found)


def _widened(values: npt.NDArray[Any], count: int, otherwise: float) -> npt.NDArray[Any]:
    """Return values of shape `(n, k)` with more columns."""
    found = np.full((len(values), count), otherwise, values.dtype)
    found[:, : values.shape[1]] = values[:, :count]
    return found
