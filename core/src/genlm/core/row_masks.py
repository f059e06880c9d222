"""`RowMasks`: the sets of tokens that the rows of a batch are restricted to.

Masks stay packed, a bit for each id, until a part of the rows is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.errors import each_in_batch
from genlm.core.masks import Mask

if TYPE_CHECKING:
    from genlm.core.masks import MaskLike

    MasksLike: TypeAlias = (
        "RowMasks | MaskLike | Sequence[MaskLike | None] | np.ndarray[Any, Any] | torch.Tensor "
        "| PendingMasks"
    )

__all__ = ["PendingMasks", "RowMasks"]


@runtime_checkable
class PendingMasks(Protocol):
    """Masks that another thread computes, such as a `concurrent.futures.Future` of them."""

    def result(self) -> torch.Tensor:
        """Wait for the masks, and return them: booleans, or packed bits."""
        ...


class RowMasks:
    """A set of tokens for each row of a batch.

    Args:
        masks: One of
            - one mask for all rows, in any form that `Mask` takes;
            - a list of masks, each in such a form, or None for all tokens;
            - booleans, shape `(m, vocab_size)`, numpy or torch on any device;
            - packed bits, int32, shape `(m, ceil(vocab_size / 32))`, id i in bit `i % 32` of
              word `i // 32`, as the bitmasks of xgrammar and llguidance, numpy or torch on any
              device. Bits beyond the vocabulary are ignored;
            - `PendingMasks` of booleans or packed bits, with an index: the engine waits for
              them when it has the rows.

            Arrays are not copied: they must not change while they are in use.
        count: Number of rows.
        vocab_size: Number of ids in the vocabulary.
        index: The mask of each row, shape `(count,)`, integers from 0 to m - 1; by default
            row i has mask i, or all rows have the only one.

    Raises:
        ValueError: Another number of masks than of rows, or masks of another size.
        TokenIdError: An id outside the vocabulary.
        TokenTypeError: None of these forms.
    """

    def __init__(
        self,
        masks: MasksLike,
        count: int,
        vocab_size: int,
        index: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor | None = None,
    ) -> None:
        self._size = vocab_size
        self._factors: dict[torch.device, torch.Tensor] = {}
        self._index: torch.Tensor | None
        self._unrestricted: torch.Tensor | None
        if isinstance(masks, PendingMasks):
            if index is None:
                raise ValueError("pending masks need an index with the mask of each row")
            self._pending: PendingMasks = masks
            self._unrestricted = None
            self._index = torch.as_tensor(index, dtype=torch.long).cpu()
            return
        self._rows, self._is_packed, full, places = _table(masks, vocab_size)
        shown = len(self._rows) if places is None else len(places)
        if index is not None:
            chosen = torch.as_tensor(index, dtype=torch.long).cpu()
            _check_index(chosen, count, shown)
            places = chosen if places is None else places[chosen]
        elif shown not in {1, count}:
            raise ValueError(
                f"{shown} masks for {count} rows; pass one for all, one for each, or an index "
                f"with the mask of each row"
            )
        if len(self._rows) == 1:
            places = torch.zeros(count, dtype=torch.long)
        self._index = places
        self._unrestricted = None if full is None or not full.any() else full

    @property
    def is_pending(self) -> bool:
        """Whether another thread computes the masks, which are not waited for yet."""
        return "_rows" not in vars(self)

    @functools.cached_property
    def _rows(self) -> torch.Tensor:
        table: torch.Tensor
        table, self._is_packed = _array_table(self._pending.result(), self._size)
        assert self._index is not None  # noqa: S101 - pending masks have one
        _check_index(self._index, len(self._index), len(table))
        return table

    def __getstate__(self) -> dict[str, Any]:
        """Wait for pending masks: other processes get arrays."""
        _ = self._rows
        return {name: each for name, each in vars(self).items() if name != "_pending"}

    @property
    def unrestricted(self) -> torch.Tensor | None:
        """Which rows have None for a mask, shape `(count,)`, on the CPU; None if no row has."""
        full = self._unrestricted
        return full if full is None or self._index is None else full[self._index]

    def of(self, chosen: npt.NDArray[np.int64]) -> RowMasks:
        """Return the masks of some rows, repeated or not."""
        found = object.__new__(RowMasks)
        vars(found).update(vars(self))
        found._index = self.places[torch.from_numpy(chosen)]
        return found

    @property
    def places(self) -> torch.Tensor:
        """Which mask each row has: equal places are equal masks. Shape `(count,)`, int64."""
        return torch.arange(len(self._rows)) if self._index is None else self._index

    @property
    def is_empty(self) -> npt.NDArray[np.bool_]:
        """Which rows have a mask without any token, shape `(count,)`."""
        rows = self._rows
        if self._is_packed:
            whole, rest = divmod(self._size, 8)
            last = rows[:, whole : whole + 1] & (2**rest - 1)  # bits beyond the vocabulary
            rows = torch.cat([rows[:, :whole], last], 1)
        empty: npt.NDArray[np.bool_] = rows.amax(1).eq(0).cpu()[self.places].numpy()
        return empty

    def factors(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Return 1 for the tokens that rows may have, 0 for others.

        Returns:
            Shape `(end - begin, vocab_size)`, uint8, on `device`; `(1, vocab_size)` and float32
            if all rows have the same mask.
        """
        if len(self._rows) == 1:
            if device not in self._factors:
                # torch multiplies by floats nearly twice as fast as by bytes.
                self._factors[device] = self._unpacked(self._rows, device).float()
            return self._factors[device]
        if self._index is None:
            return self._unpacked(self._rows[begin:end], device)
        places = self._index[begin:end]
        if self._rows.device != device and len(self._rows) < end - begin:
            return self._unpacked(self._rows.to(device)[places.to(device)], device)  # each once
        return self._unpacked(self._rows[places.to(self._rows.device)], device)

    def _unpacked(self, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        rows = rows.to(device)
        if not self._is_packed:
            return rows
        if device.type == "cpu":
            bits = np.unpackbits(rows.numpy(), axis=1, count=self._size, bitorder="little")
            return torch.from_numpy(bits)
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        return ((rows[:, :, None] >> shifts) & 1).flatten(1)[:, : self._size]


def _table(
    masks: Any, size: int
) -> tuple[torch.Tensor, bool, torch.Tensor | None, torch.Tensor | None]:
    """Return masks as rows of a table.

    Returns:
        The table, uint8, of bits or of bytes; whether it is of bits; which of its rows are
        None; and the place of each mask in it, None if mask i has place i.
    """
    if getattr(masks, "ndim", 0) == 2:
        return *_array_table(masks, size), None, None
    if not (isinstance(masks, (list, tuple)) and masks and _is_mask(masks[0])):
        masks = [masks]
    every = np.full(-(-size // 8), 255, np.uint8)
    place_of: dict[int, int] = {}
    made: list[npt.NDArray[np.uint8]] = []

    def place(mask: Any) -> int:
        found = place_of.setdefault(id(mask), len(made))
        if found == len(made):
            made.append(every if mask is None else Mask(mask, size).packed)
        return found

    places = torch.tensor(each_in_batch(place, masks))
    table, full = torch.from_numpy(np.stack(made)), [each is every for each in made]
    return table, True, torch.tensor(full), None if len(made) == len(masks) else places


def _array_table(masks: np.ndarray[Any, Any] | torch.Tensor, size: int) -> Any:
    if isinstance(masks, np.ndarray):
        masks = torch.from_numpy(np.require(masks, requirements="W"))  # else torch warns
    table = masks
    widths = {torch.bool: size, torch.int32: -(-size // 32)}
    if table.dtype not in widths or table.shape[1] != widths[table.dtype]:
        raise ValueError(
            f"masks of shape {tuple(table.shape)}, {table.dtype}; expected booleans of shape "
            f"(masks, {size}), or packed bits, int32, of shape (masks, {-(-size // 32)})"
        )
    return table.contiguous().view(torch.uint8), table.dtype == torch.int32


def _is_mask(value: object) -> bool:
    """Whether an entry of a list is a mask, not a token id or a boolean."""
    return value is None or (hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0)


def _check_index(index: torch.Tensor, count: int, masks: int) -> None:
    if tuple(index.shape) != (count,):
        raise ValueError(f"an index of shape {tuple(index.shape)} for {count} rows")
    if count and not 0 <= int(index.min()) <= int(index.max()) < masks:
        wrong = ((index < 0) | (index >= masks)).nonzero()[:, 0].tolist()
        shown = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise ValueError(
            f"indices of masks must be from 0 to {masks - 1}; {len(wrong)} of {count} are not, "
            f"at places {shown}; the first is {int(index[wrong[0]])}"
        )
