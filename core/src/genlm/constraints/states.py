"""`StateConstraint`: members in numbered states, with the rules that all languages share.

A member that violated the language is dead. A stop token finishes a member whose text is
complete. If there are no stop tokens, a member is finished when its text is complete and has no
continuation. Dead and finished members do not change, and no token is drawn for them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.constraints.protocol import Constraint, Flags, Floats, Integers64, IntegersLike
from genlm.core.base.arrays import host_array, signed_index
from genlm.core.base.immutable import Immutable
from genlm.core.base.validation import checked_size
from genlm.core.model.members import checked_array

if TYPE_CHECKING:
    from genlm.core.model.population import Population
    from genlm.core.rows.row_masks import MasksLike, RowMasks

States: TypeAlias = npt.NDArray[Any]

DEAD, FINISHED, LIVE = 0, 1, 2
"""States of dead and of finished members, and the first state of other members."""


class StateConstraint(Immutable, Constraint):
    """A constraint whose members have numbered states; the first two are dead and finished.

    The constraint after drawn tokens is computed before the draw returns, so that `advance`
    only compares the tokens on the caller's thread.

    Args:
        states: State of each member, shape `(n,)`.
        vocab_size: Number of token ids.
    """

    _pickling_error = (
        "a Constraint belongs to a vocabulary and cannot be pickled; pickle its language, "
        "and create it again with the language's method start"
    )

    _row_masks: RowMasks
    """The mask of each member, whose table has the masks of all states."""

    def __init__(self, states: States, vocab_size: int) -> None:
        self.states = states
        self._finished: Flags = states == FINISHED
        self._dead: Flags = states == DEAD
        self._vocab_size = vocab_size
        self.next_constraint: tuple[bytes, Any] | None = None
        """The tokens of the last draw, and the constraint after them until it is returned."""

    @property
    def finished(self) -> Flags:  # type: ignore[override]
        """Whether the text of each member has ended."""
        return self._finished.copy()

    @property
    def log_potential(self) -> Floats:  # type: ignore[override]
        """0 for each member, `-inf` for dead ones."""
        return np.where(self._dead, -np.inf, 0.0)

    def __len__(self) -> int:
        return len(self.states)

    @property
    def _finished_and_dead(self) -> tuple[Flags, Flags]:
        return self._finished, self._dead

    def _check_size(self, population: Population) -> None:
        super()._check_size(population)
        found = population._lm.vocabulary.size  # noqa: SLF001 - internal to genlm
        if found != self._vocab_size:
            raise ValueError(
                f"a constraint for {self._vocab_size} token ids and a population whose model "
                f"has {found}; start the constraint with the model of the population"
            )

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return masks of states as packed bits, and the place of each member's among them.

        Waits until they are computed.
        """
        words, places, _ = self._row_masks.bits(torch.device("cpu"))
        return words.view(torch.int32), places.numpy()

    def _draw_masks(self) -> tuple[MasksLike, Integers64 | None]:
        return self._row_masks, None

    def advance(self, token_ids: IntegersLike) -> Self:
        """Return the constraint after tokens, which is already computed for drawn tokens."""
        ids = checked_array(token_ids)
        prepared, self.next_constraint = self.next_constraint, None
        if prepared is not None and ids.shape == self.states.shape:
            packed, after = prepared
            if ids.tobytes() == packed:
                return after  # type: ignore[no-any-return]
        return self._after(checked_tokens(ids, len(self), self._vocab_size).copy())

    @abstractmethod
    def _after(self, token_ids: Integers64, *, are_drawn: bool = False) -> Self:
        """Return the constraint after tokens.

        Args:
            token_ids: Token ids, shape `(n,)`, -1 for no token; not changed by others.
            are_drawn: Whether the tokens were drawn from the masks of the constraint.
        """

    def _prepare_advance(self, token_ids: Integers64) -> None:
        ids = token_ids.copy()
        self.next_constraint = ids.tobytes(), self._after(ids, are_drawn=True)


def first_states(size: int, state: int = LIVE) -> States:
    """Return the state of `size` members, all the same; `size` is an integer of at least 0."""
    return np.full(checked_size(size, 0), state)


def check_text(text: object) -> None:
    """Raise `TypeError` unless a text is bytes."""
    if not isinstance(text, (bytes, bytearray)):
        raise TypeError(f"text={text!r}; texts of languages are bytes, such as b' 20'")


def checked_tokens(ids: Integers64, count: int, vocab_size: int) -> Integers64:
    """Return the tokens of `count` members; raise `ValueError` for other shapes or ids."""
    if ids.shape != (count,):
        raise ValueError(f"token ids of shape {ids.shape} for {count} members")
    if count and not -1 <= np.minimum.reduce(ids) <= np.maximum.reduce(ids) < vocab_size:
        raise ValueError(
            f"token ids from {ids.min()} to {ids.max()}; expected 0 to {vocab_size - 1}, or -1 "
            f"for no token"
        )
    return ids


def member_index(ancestors: Any) -> Any:
    """Return an index of members in a form that numpy accepts: a slice or an array.

    Raises:
        IndexError: The index is not a slice or an array of one dimension.
    """
    if isinstance(ancestors, slice):
        return ancestors
    index = host_array(ancestors, "an index of a constraint")
    if index.ndim != 1 or (index.dtype.kind not in "iub" and index.size):
        raise IndexError(
            f"a constraint is indexed by a slice, or an array of integers or booleans of one "
            f"dimension; found {index.dtype} of shape {index.shape}"
        )
    return signed_index(index)
