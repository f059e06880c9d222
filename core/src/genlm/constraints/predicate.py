"""`Python`: texts that a function accepts, which is called only for drawn tokens."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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
from genlm.constraints.rejection import Rejection
from genlm.constraints.states import (
    DEAD,
    FINISHED,
    LIVE,
    StateConstraint,
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
        self._prefix = prefix
        self._complete = prefix if complete is None else complete
        for function in (self._prefix, self._complete):
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
        return _Tested(self, text_tokens.get(llm.vocabulary, stop), within, [text] * size)

    def allows(self, text: bytes) -> bool:
        """Whether a text may be continued."""
        return bool(self._prefix(text))

    def may_end(self, text: bytes) -> bool:
        """Whether a text may end."""
        return bool(self._complete(text))

    def __repr__(self) -> str:
        name = getattr(self._prefix, "__name__", repr(self._prefix))
        return f"<Python {name} within {self._within!r}>"


class _Tested(StateConstraint):
    """The texts of members, and the constraint from whose masks tokens are drawn."""

    def __init__(
        self, language: Python, tokens: TextTokens, within: Constraint, texts: list[bytes]
    ) -> None:
        super().__init__(np.full(len(texts), LIVE))
        self.language = language
        self.tokens = tokens
        self.within = within
        self.texts = np.empty(len(texts), object)
        self.texts[:] = texts
        self.first_draws = _FIRST_DRAWS
        self.known: dict[tuple[bytes, bool], bool] = {}
        """Results of the functions, which are called once for a text and whether it ends."""
        self.accepted: _Accepted | None = None
        """The tokens of the last draw."""

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the masks from which tokens are drawn before the function is called."""
        return self.within.masks()

    def advance(self, token_ids: IntegersLike) -> Self:
        """Append tokens to the texts. Drawn tokens are not tested again."""
        ids = token_column(token_ids, len(self), len(self.tokens.texts))
        within = self.within.advance(ids)
        states = np.where(np.isneginf(within.log_potential), DEAD, self.states)
        states[self.tokens.is_stop[ids] & (states == LIVE)] = FINISHED
        states[self.states != LIVE] = self.states[self.states != LIVE]
        texts, is_new = self.texts.copy(), (ids >= 0) & (self.states == LIVE)
        if self.accepted is not None:
            is_known = is_new & (ids == self.accepted.token_ids)
            texts[is_known] = self.accepted.texts[is_known]
            is_new &= ~is_known
        for member in np.flatnonzero(is_new & (states != DEAD)).tolist():
            texts[member], is_accepted = self.tested(self.texts[member], int(ids[member]))
            if not is_accepted:
                states[member] = DEAD
        for member in np.flatnonzero(within.finished & (states == LIVE)).tolist():
            is_accepted = self.language.may_end(texts[member])
            states[member] = FINISHED if is_accepted else DEAD
        found = self.moved(states)
        found.within, found.texts, found.accepted = within, texts, None
        found.known = {}
        if self.accepted is not None:
            found.first_draws = self.accepted.draws
        return found

    def tested(self, text: bytes, token_id: int) -> tuple[bytes, bool]:
        """Return a text extended by a token, and whether it may continue or end there."""
        is_end = bool(self.tokens.is_stop[token_id])
        key = (text if is_end else text + self.tokens.texts[token_id]), is_end
        if key not in self.known:
            function = self.language.may_end if is_end else self.language.allows
            self.known[key] = function(key[0])
        return key[0], self.known[key]

    def __getitem__(self, ancestors: Any) -> Self:
        chosen = chosen_members(ancestors)
        found = super().__getitem__(chosen)
        found.within, found.texts = self.within[chosen], self.texts[chosen]
        found.accepted = None
        return found

    async def draw(
        self, population: Population, *, temperature: float = 1.0, seed: int | None = None
    ) -> DrawnTokens:
        """Draw tokens without replacement until the function accepts one for each member.

        Returns:
            As `Constraint.draw`; `log_mass` is the log of an unbiased estimate.
        """
        is_active = ~population.finished.numpy() & (self.states != FINISHED)
        search, done, count = _Search(self, is_active), 0, self.first_draws
        masks, index = self.within._draw_masks()  # noqa: SLF001 - of the same package
        seed = secrets.randbits(63) if seed is None else seed
        while not search.rejection.is_over.all():
            drawn = await population.finish(search.rejection.is_over).draw_without_replacement(
                count, masks, mask_index=index, temperature=temperature, seed=seed
            )
            search.take(drawn, done)  # more draws by one seed begin with the same tokens
            done, count = count, min(4 * count, len(self.tokens.texts) + 1)
        self.accepted = search.accepted()
        return search.drawn()


class _Accepted(NamedTuple):
    """Accepted tokens of a draw.

    Attributes:
        token_ids: A token of each member; -1 for none.
        texts: Texts of the members after these tokens.
        draws: Number of draws that were sufficient for every accepted token and its estimate.
    """

    token_ids: Integers64
    texts: npt.NDArray[np.object_]
    draws: int


class _Search:
    """The draws of one step for all members, until each has an accepted token."""

    def __init__(self, constraint: _Tested, is_active: Flags) -> None:
        self._constraint = constraint
        size = len(constraint)
        self.rejection = Rejection(size, constraint.language.extra_draws)
        self.rejection.end(np.flatnonzero(~is_active | (constraint.states == DEAD)))
        self._is_active = is_active
        self._token_ids = np.full(size, -1)
        self._logprobs = np.zeros(size)
        self._texts = constraint.texts.copy()

    def take(self, drawn: DrawnTokens, done: int) -> None:
        """Test the draws of members that are not over, in order, after the first `done`."""
        rejection, tested = self.rejection, self._constraint.tested
        token_ids, logprobs = drawn.token_ids.numpy(), drawn.logprobs.double().numpy()
        draw_logprobs = drawn.draw_logprob.double().numpy()
        for place in range(done, token_ids.shape[1]):
            ids = token_ids[:, place]
            members = np.flatnonzero(~rejection.is_over)
            is_last = ids[members] < 0
            rejection.end(members[is_last])
            members = members[~is_last]
            if not len(members):
                break
            texts, tokens = self._constraint.texts[members].tolist(), ids[members]
            found = [*map(tested, texts, tokens.tolist())]
            is_accepted = np.array([flag for _, flag in found])
            is_new = is_accepted & (rejection.place[members] < 0)
            new = members[is_new]
            self._token_ids[new], self._logprobs[new] = tokens[is_new], logprobs[new, place]
            for row in np.flatnonzero(is_new).tolist():
                self._texts[members[row]] = found[row][0]
            at_hand = token_ids.shape[1] - 1 - place
            rejection.add(members, draw_logprobs[members, place], is_accepted, at_hand)

    def drawn(self) -> DrawnTokens:
        """Return the accepted tokens of the members, with their weights."""
        rejection, logprobs = self.rejection, self._logprobs
        is_drawn = self._token_ids >= 0
        log_mass = np.where(is_drawn, rejection.log_mass, 0.0)
        log_weights = np.where(is_drawn, logprobs - rejection.log_probability + log_mass, 0.0)
        is_lost = self._is_active & ~is_drawn
        log_weights[is_lost] = logprobs[is_lost] = -np.inf
        draw_logprobs = logprobs.copy()
        draw_logprobs[is_drawn] -= log_weights[is_drawn]
        columns = logprobs, log_weights, draw_logprobs
        return DrawnTokens(
            torch.from_numpy(self._token_ids.copy()),
            *(torch.from_numpy(each).float() for each in columns),
        )

    def accepted(self) -> _Accepted:
        """Return the accepted tokens, and the number of draws for the next step."""
        least = 1 + self._constraint.language.extra_draws
        needed = int(self.rejection.place.max(initial=-1)) + least
        draws = min(max(least, needed), max(least, _MAX_FIRST_DRAWS))
        return _Accepted(self._token_ids, self._texts, draws)
