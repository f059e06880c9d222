"""`StateConstraint`: members in numbered states, with the rules that all languages share.

A member that violated the language is dead. A stop token finishes a member whose text is
complete. If there are no stop tokens, a member is finished when its text is complete and has no
continuation. Dead and finished members do not change, and no token is drawn for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.constraints.protocol import Constraint, Flags, Floats, Integers64, IntegersLike
from genlm.core.base.validation import checked_integer
from genlm.core.model.members import checked_array

if TYPE_CHECKING:
    from genlm.core.rows.row_masks import MasksLike

__all__ = [
    "DEAD",
    "FINISHED",
    "LIVE",
    "DeferredMasks",
    "StateConstraint",
    "States",
    "check_text",
    "first_states",
    "member_index",
    "token_column",
]

States: TypeAlias = npt.NDArray[Any]

DEAD, FINISHED, LIVE = 0, 1, 2
"""States of dead and of finished members, and the first state of other members."""


class StateConstraint(Constraint):
    """A constraint whose members have numbered states; the first two are dead and finished.

    Args:
        states: State of each member, shape `(n,)`.
    """

    def __init__(self, states: States) -> None:
        self.states = states

    @property
    def finished(self) -> Flags:  # type: ignore[override]
        """Whether the text of each member has ended."""
        finished: Flags = self.states == FINISHED
        return finished

    @property
    def log_potential(self) -> Floats:  # type: ignore[override]
        """0 for each member, `-inf` for dead ones."""
        return np.where(self.states == DEAD, -np.inf, 0.0)

    def __len__(self) -> int:
        return len(self.states)

    def _inactive(self) -> Flags | None:
        inactive: Flags = self.states < LIVE
        return inactive if np.logical_or.reduce(inactive) else None


class DeferredMasks(NamedTuple):
    """Masks that the engine's thread requests when it has computed the rows.

    Attributes:
        result: Function that returns the masks and the index of each row's mask.
    """

    result: Callable[[], tuple[MasksLike, Integers64]]


def first_states(size: int, state: int = LIVE) -> States:
    """Return the state of `size` members, all the same.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is negative.
    """
    return np.full(checked_integer("size", size, 0), state)


def check_text(text: object) -> None:
    """Refuse a text that is not bytes.

    Raises:
        TypeError: `text` is not `bytes`.
    """
    if not isinstance(text, (bytes, bytearray)):
        raise TypeError(f"text={text!r}; texts of languages are bytes, such as b' 20'")


def token_column(token_ids: IntegersLike, count: int, vocab_size: int) -> Integers64:
    """Return the tokens of `count` members as an array.

    Raises:
        TypeError: The ids are not integers.
        ValueError: The shape is not `(count,)`, or an id is outside the vocabulary.
    """
    ids = checked_array(token_ids)
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
    if isinstance(ancestors, torch.Tensor):
        ancestors = ancestors.cpu().numpy()
    index = np.asarray(ancestors)
    if index.ndim != 1 or (index.dtype.kind not in "iub" and index.size):
        raise IndexError(
            f"a constraint is indexed by a slice, or an array of integers or booleans of one "
            f"dimension; found {index.dtype} of shape {index.shape}"
        )
    return index if index.size else index.astype(np.int64)
