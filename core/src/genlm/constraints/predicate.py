"""`Python`: texts that a function accepts, which is called only for drawn tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from genlm.constraints.automaton import Automaton
from genlm.constraints.byte_automata import utf8_table
from genlm.constraints.protocol import (
    Constraint,
    Flags,
    Integers64,
    IntegersLike,
    Language,
    TextTokens,
    chosen_members,
    token_column,
)
from genlm.constraints.rejection import Rejection
from genlm.core.population import DrawnTokens
from genlm.core.row_masks import RowMasks
from genlm.core.sampling import stream_seeds
from genlm.core.validation import checked_integer

if TYPE_CHECKING:
    from genlm.core.lm import AsyncLM
    from genlm.core.population import Population
    from genlm.core.row_masks import MasksLike
    from genlm.core.validation import Integers

__all__ = ["Python"]

_FIRST_DRAWS = 8
"""Number of tokens drawn in the first round; each further round draws four times as many."""
_MAX_ROUNDS = 32
"""Maximum number of rounds; no vocabulary requires more."""


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
        self._within = Automaton(*utf8_table()) if within is None else within
        self.extra_draws = checked_integer("extra_draws", extra_draws, 1)
        """Number of tokens drawn after the accepted one."""

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`."""
        within = self._within.start(llm, size, text=text, stop=stop)
        return _Tested(self, TextTokens.of(llm.vocabulary, stop), within, [text] * size)

    def allows(self, text: bytes) -> bool:
        """Whether a text may be continued."""
        return bool(self._prefix(text))

    def may_end(self, text: bytes) -> bool:
        """Whether a text may end."""
        return bool(self._complete(text))

    def __repr__(self) -> str:
        name = getattr(self._prefix, "__name__", repr(self._prefix))
        return f"<Python {name} within {self._within!r}>"


class _Tested(Constraint):
    """The texts of members, and the constraint from whose masks tokens are drawn."""

    def __init__(
        self,
        language: Python,
        tokens: TextTokens,
        within: Constraint,
        texts: list[bytes],
    ) -> None:
        self.language = language
        self.tokens = tokens
        self.within = within
        self.texts = np.empty(len(texts), object)
        self.texts[:] = texts
        self.stops = frozenset(tokens.stop.tolist())
        self.accepted: dict[tuple[bytes, bool], bool] = {}
        self.finished = np.zeros(len(texts), np.bool_)
        self.log_potential = np.zeros(len(texts))

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the masks from which tokens are drawn before the function is called."""
        return self.within.masks()

    def advance(self, token_ids: IntegersLike) -> Self:
        """Append tokens to the texts. Drawn tokens are not tested again."""
        ids = token_column(token_ids, len(self))
        found = copy.copy(self)
        found.accepted = {}
        found.texts, found.finished = self.texts.copy(), self.finished.copy()
        found.within = self.within.advance(ids)
        found.log_potential = np.minimum(self.log_potential, found.within.log_potential)
        is_stop = np.isin(ids, self.tokens.stop)
        is_live = found.log_potential > -np.inf
        for member in np.flatnonzero((ids >= 0) & ~self.finished & is_live).tolist():
            if not self.accepts(member, int(ids[member])):
                found.log_potential[member] = -np.inf
            elif is_stop[member]:
                found.finished[member] = True
            else:
                found.texts[member] = self.texts[member] + self.tokens.texts[ids[member]]
        found.end_with(found.within.finished & ~found.finished)
        return found

    def end_with(self, members: Flags) -> None:
        """Finish members whose other constraint is finished, or mark them as dead."""
        for member in np.flatnonzero(members & (self.log_potential > -np.inf)).tolist():
            self.finished[member] = self.language.may_end(self.texts[member])
            if not self.finished[member]:
                self.log_potential[member] = -np.inf

    def __getitem__(self, ancestors: Any) -> Self:
        chosen = chosen_members(ancestors)
        found = copy.copy(self)
        found.texts = self.texts[chosen]
        found.finished = self.finished[chosen]
        found.log_potential = self.log_potential[chosen]
        found.within = self.within[chosen]
        return found

    def accepts(self, member: int, token_id: int) -> bool:
        """Whether a token of the masks may continue or end a text; a text is tested once."""
        text, is_stop = self.texts[member], token_id in self.stops
        key = (text if is_stop else text + self.tokens.texts[token_id]), is_stop
        if key not in self.accepted:
            test = self.language.may_end if is_stop else self.language.allows
            self.accepted[key] = test(key[0])
        return self.accepted[key]

    async def draw(
        self, population: Population, *, temperature: float = 1.0, seed: int | None = None
    ) -> DrawnTokens:
        """Draw tokens without replacement until the function accepts one for each member.

        Returns:
            As `Constraint.draw`; `log_mass` is the log of an unbiased estimate.
        """
        is_over = population.finished.numpy() | self.finished
        search = _Search(self, ~is_over)
        masks, index = self.masks()
        count, seeds = _FIRST_DRAWS, stream_seeds(seed, _MAX_ROUNDS)
        for round_seed in seeds:
            waiting = search.waiting()
            if not len(waiting):
                break
            is_done = np.ones(len(self), np.bool_)
            is_done[waiting] = False
            drawn = await population.finish(is_done).draw_without_replacement(
                count, masks, mask_index=index, temperature=temperature, seed=round_seed
            )
            search.take(waiting, drawn)
            waiting = search.waiting()
            if len(waiting):
                masks, index = search.masks_left(waiting, masks, index)
            count = min(4 * count, len(self.tokens.texts))
        return search.drawn()


class _Search:
    """The draws of one step for all members, until each has an accepted token."""

    def __init__(self, constraint: _Tested, active: Flags) -> None:
        self._constraint = constraint
        self._size = len(constraint)
        extra = constraint.language.extra_draws
        self._rejections = {
            member: Rejection(extra) for member in np.flatnonzero(active).tolist()
        }
        for member in np.flatnonzero(np.isneginf(constraint.log_potential)).tolist():
            if member in self._rejections:
                self._rejections[member].end()
        self._drawn: dict[int, list[int]] = {member: [] for member in self._rejections}
        self._token_ids = np.full(self._size, -1)
        self._logprobs = np.zeros(self._size)

    def waiting(self) -> Integers64:
        """Return the members that need more draws, ascending."""
        found = [member for member, each in self._rejections.items() if not each.is_over]
        return np.array(found, np.int64)

    def take(self, members: Integers64, drawn: DrawnTokens) -> None:
        """Test the draws of some members, in order."""
        for member in members.tolist():
            rejection, ids = self._rejections[member], drawn.token_ids[member].tolist()
            logprobs = drawn.draw_logprob[member].tolist()
            for place, token_id in enumerate(ids):
                if token_id < 0:
                    rejection.end()
                    break
                is_accepted = self._constraint.accepts(member, token_id)
                if is_accepted and rejection.place is None:
                    self._token_ids[member] = token_id
                    self._logprobs[member] = float(drawn.logprobs[member, place])
                left = len(ids) - 1 - place
                rejection.add(logprobs[place], left, is_accepted=is_accepted)
                self._drawn[member].append(token_id)
                if rejection.is_over:
                    break

    def masks_left(
        self, members: Integers64, masks: MasksLike, index: Integers64 | None
    ) -> tuple[torch.Tensor, Integers64]:
        """Return the masks without the drawn tokens."""
        tokens = self._constraint.tokens
        size = len(tokens.texts)
        rows = RowMasks(masks, self._size, size, index).of(members)
        factors = rows.factors(0, len(members), torch.device("cpu"))
        allowed = factors.bool().expand(len(members), size).numpy().copy()
        for row, member in enumerate(members.tolist()):
            allowed[row, self._drawn[member]] = False
        places = np.zeros(self._size, np.int64)
        places[members] = np.arange(len(members))
        return tokens.pack(allowed), places

    def drawn(self) -> DrawnTokens:
        """Return the accepted tokens of the members, with their weights."""
        log_weights, logprobs = np.zeros(self._size), self._logprobs.copy()
        for member, rejection in self._rejections.items():
            if rejection.place is None:
                log_weights[member] = logprobs[member] = -np.inf
            else:
                ratio = logprobs[member] - rejection.log_probability
                log_weights[member] = ratio + rejection.log_mass
        is_drawn = self._token_ids >= 0
        draw_logprobs = np.where(is_drawn, logprobs, 0.0) - np.where(is_drawn, log_weights, 0.0)
        columns = logprobs, log_weights, np.where(is_drawn, draw_logprobs, logprobs)
        return DrawnTokens(
            torch.from_numpy(self._token_ids),
            *(torch.from_numpy(each).float() for each in columns),
        )
