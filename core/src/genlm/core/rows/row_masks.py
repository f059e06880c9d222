"""`RowMasks`: the sets of allowed tokens of the rows of a batch.

Masks stay packed, a bit for each id, until a part of the rows is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.arrays import check_readable, native_array
from genlm.core.base.error_handling import errors_of, map_batch
from genlm.core.base.forking import cached_property
from genlm.core.base.validation import is_sequence_like
from genlm.core.rows.logits import moved
from genlm.core.rows.masks import Mask, MaskLike

MasksLike: TypeAlias = (
    "RowMasks | MaskLike | Sequence[MaskLike | None] | np.ndarray[Any, Any] | torch.Tensor"
)
_TableAndIndex: TypeAlias = "tuple[_MaskTable, torch.Tensor | None]"


class RowMasks:
    """A set of tokens for each row of a batch.

    Args:
        masks: One of
            - one mask for all rows, in any form that `Mask` takes, or a list of such masks,
              with None for all tokens;
            - booleans, shape `(m, vocab_size)`, or packed bits, int32, shape
              `(m, ceil(vocab_size / 32))`, numpy or torch on any device. These arrays are not
              copied: they must not change while they are in use.
        count: Number of rows.
        vocab_size: Number of ids in the vocabulary.
        index: The mask of each row, shape `(count,)`, integers from 0 to m - 1; by default
            row i has mask i, or all rows have the only one.

    Attributes:
        count: Number of rows.
        is_deferred: Whether the masks are computed when the engine has the rows.

    Raises:
        ValueError: The number of masks differs from that of rows, or a mask has another size.
        QueryError: As `Mask`.
    """

    _compute: Callable[[], RowMasks]  # of deferred masks

    def __init__(
        self,
        masks: MasksLike,
        count: int,
        vocab_size: int,
        index: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor | None = None,
    ) -> None:
        self.count, self.is_deferred = count, False
        self._computed = _table_and_index(masks, count, vocab_size, index)

    @classmethod
    def _of(cls, computed: _TableAndIndex, count: int) -> RowMasks:
        masks = object.__new__(cls)
        masks.count, masks.is_deferred, masks._computed = count, False, computed
        return masks

    @classmethod
    def of_bits(
        cls,
        words: npt.NDArray[np.int32],
        vocab_size: int,
        places: npt.NDArray[np.int64],
        *,
        is_shared: bool = False,
    ) -> RowMasks:
        """Return masks that need no checks.

        Args:
            words: Packed bits, shape `(m, ceil(vocab_size / 32))`, contiguous; not copied.
            vocab_size: Number of ids in the vocabulary.
            places: The mask of each row, shape `(count,)`.
            is_shared: Whether several requests use the masks.
        """
        rows = torch.from_numpy(words).view(torch.uint8)
        table = _MaskTable(rows, vocab_size, is_packed=True, is_shared=is_shared)
        return cls._of((table, torch.from_numpy(places)), len(places))

    @classmethod
    def deferred(cls, compute: Callable[[], RowMasks], count: int) -> RowMasks:
        """Return masks that a function computes when the engine has the rows.

        Args:
            compute: Function that returns the masks of the same rows. The engine's thread calls
                it, so it must not wait for anything that may not happen.
            count: Number of rows.
        """
        masks = object.__new__(cls)
        masks.count, masks.is_deferred, masks._compute = count, True, compute
        return masks

    @cached_property
    def _computed(self) -> _TableAndIndex:
        """The distinct masks, and the place of each row's mask; None if row i has mask i."""
        with errors_of("the computation of masks"):
            return self._compute()._computed  # noqa: SLF001 - of the same class

    def __getstate__(self) -> dict[str, Any]:
        """Compute deferred masks: other processes get arrays of the masks in use."""
        table, index = self._computed
        if index is not None:
            used, inverse = np.unique(index.numpy(), return_inverse=True)
            table, index = table.of(torch.from_numpy(used)), torch.from_numpy(inverse)
        return {"count": self.count, "is_deferred": False, "_computed": (table, index)}

    @property
    def unrestricted(self) -> torch.Tensor | None:
        """Which rows have no mask, shape `(count,)`, on the CPU; None if all rows have one."""
        table, index = self._computed
        full = table.unrestricted
        return full if full is None or index is None else full[index]

    def of(self, rows: npt.NDArray[np.int64]) -> RowMasks:
        """Return the masks of some rows, possibly with repetitions."""
        if self.is_deferred:
            return self.deferred(lambda: self._of_computed(rows), len(rows))
        return self._of_computed(rows)

    def _of_computed(self, rows: npt.NDArray[np.int64]) -> RowMasks:
        """Return the masks of some rows of masks that are computed."""
        places = self.places[torch.from_numpy(rows)]
        return self._of((self._computed[0], places), len(rows))

    @classmethod
    def joined(cls, batches: Sequence[RowMasks]) -> RowMasks:
        """Return the masks of the rows of several batches, one batch after the other."""
        tables = [masks._computed[0] for masks in batches]  # noqa: SLF001 - of the same class
        places = [masks.places for masks in batches]
        table = tables[0]
        if any(other is not table for other in tables):
            table, places = _joined_table(tables, places)
        return cls._of((table, torch.cat(places)), sum(masks.count for masks in batches))

    def __and__(self, other: RowMasks) -> RowMasks:
        """Return the intersection of both masks of each row."""
        if self.is_deferred or other.is_deferred:
            return self.deferred(lambda: self._and_computed(other), self.count)
        return self._and_computed(other)

    def _and_computed(self, other: RowMasks) -> RowMasks:
        pairs = torch.stack([self.places, other.places], 1)
        distinct, index = torch.unique(pairs, dim=0, return_inverse=True)
        size = self._computed[0].size
        words = [
            masks._computed[0].of(places).words  # noqa: SLF001 - of the same class
            for masks, places in zip((self, other), distinct.unbind(1), strict=True)
        ]
        return self.of_bits(words[0] & words[1], size, index.numpy())

    @property
    def places(self) -> torch.Tensor:
        """Place of each row's mask; equal places are equal masks. Shape `(count,)`, int64."""
        table, index = self._computed
        return torch.arange(len(table.rows), device="cpu") if index is None else index

    @property
    def is_empty(self) -> npt.NDArray[np.bool_]:
        """Whether the mask of each row has no token, shape `(count,)`."""
        empty: npt.NDArray[np.bool_] = self._computed[0].is_empty[self.places.numpy()]
        return empty

    def bits(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Return the masks on a device.

        Returns:
            The masks, shape `(m, bytes)`, uint8; the place of each row's mask, shape
            `(count,)`, int64; and whether a byte has the bits of 8 ids, the lowest first,
            instead of one id.
        """
        table, index = self._computed
        places = self.places
        if index is None or table.is_shared or len(table.rows) <= len(places):
            rows = table.on(device)
        else:
            rows = moved(table.rows[places.to(table.rows.device)], device)
            places = torch.arange(len(places), device="cpu")
        return rows, moved(places, device), table.is_packed

    def factors(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Return 1 for the allowed tokens of rows, 0 for others.

        Returns:
            Shape `(end - begin, vocab_size)`, uint8, on `device`; `(1, vocab_size)` and float32
            if all rows have the same mask.
        """
        table, index = self._computed
        if len(table.rows) == 1:
            return table.single_factors(device)
        if index is None:
            return table.unpacked(moved(table.rows[begin:end], device))
        places = index[begin:end]
        is_copied = table.is_shared or len(table.rows) < end - begin
        rows = table.on(device) if is_copied else table.rows
        return table.unpacked(rows[places.to(rows.device)].to(device))


class _MaskTable:
    """Masks as rows of bits (`is_packed`) or of bytes, uint8, and their copies on devices.

    Attributes:
        rows: Shape `(m, bytes)`.
        unrestricted: Which of the masks stand for all tokens, shape `(m,)`; None if no mask
            does.
        is_shared: Whether several requests use the masks.
        size: Number of ids in the vocabulary.
        is_packed: Whether rows are bits.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        size: int,
        *,
        is_packed: bool,
        unrestricted: torch.Tensor | None = None,
        is_shared: bool = False,
    ) -> None:
        self.rows = rows
        self.unrestricted = unrestricted
        self.is_shared = is_shared
        self.size = size
        self.is_packed = is_packed
        self._copies: dict[torch.device, torch.Tensor] = {}
        self._single: dict[torch.device, torch.Tensor] = {}

    def of(self, places: torch.Tensor) -> _MaskTable:
        """Return some of the masks."""
        full = None if self.unrestricted is None else self.unrestricted[places]
        rows = self.rows[places.to(self.rows.device)]
        return _MaskTable(rows, self.size, is_packed=self.is_packed, unrestricted=full)

    @cached_property
    def is_empty(self) -> npt.NDArray[np.bool_]:
        """Return whether each mask is empty, shape `(m,)`."""
        rows = self.rows
        if self.is_packed:  # bits beyond the vocabulary do not count
            whole, remainder = divmod(self.size, 8)
            rows, last = rows[:, :whole], rows[:, whole : whole + 1]
            if remainder:
                rows = torch.cat([rows, last & (2**remainder - 1)], 1)
        empty: npt.NDArray[np.bool_] = rows.amax(1).eq(0).cpu().numpy()
        return empty

    @property
    def words(self) -> npt.NDArray[np.int32]:
        """The masks as packed bits, shape `(m, ceil(size / 32))`."""
        rows = self.rows.numpy(force=True)
        if not self.is_packed:
            rows = np.packbits(rows, axis=1, bitorder="little")
        words = np.zeros((len(rows), -(-self.size // 32)), np.int32)
        words.view(np.uint8)[:, : rows.shape[1]] = rows
        return words

    def on(self, device: torch.device) -> torch.Tensor:
        """Return all masks on a device, to which they are copied once."""
        if device not in self._copies:
            self._copies[device] = moved(self.rows, device)
        return self._copies[device]

    def single_factors(self, device: torch.device) -> torch.Tensor:
        """Return the factors of the only mask, float32."""
        if device not in self._single:
            # torch multiplies by floats nearly twice as fast as by bytes.
            self._single[device] = self.unpacked(moved(self.rows, device)).float()
        return self._single[device]

    def unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the table as bytes, on their device."""
        if not self.is_packed:
            return rows
        if rows.device.type == "cpu":
            bits = np.unpackbits(rows.numpy(), axis=1, count=self.size, bitorder="little")
            return torch.from_numpy(bits)
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        return ((rows[:, :, None] >> shifts) & 1).flatten(1)[:, : self.size]


def _joined_table(
    tables: Sequence[_MaskTable], places: Sequence[torch.Tensor]
) -> tuple[_MaskTable, list[torch.Tensor]]:
    """Return one table with the masks of several, and places in it.

    Args:
        tables: Masks over the same vocabulary.
        places: Places in each table; other masks of the table are left out.
    """
    is_packed, device = all(table.is_packed for table in tables), tables[0].rows.device
    width = -(-tables[0].size // 8)  # bitmasks of int32 have more bytes
    parts: list[_MaskTable] = []
    joined_places: list[torch.Tensor] = []
    begins: dict[object, int] = {}
    end = 0
    for table, index in zip(tables, places, strict=True):
        key: object = index  # hashed by identity
        if len(table.rows) == 1:  # several requests often have one mask each, which is the same
            key = table.rows.numpy(force=True).tobytes()
        else:
            used, index = torch.unique(index, return_inverse=True)  # noqa: PLW2901
            table = table.of(used)  # noqa: PLW2901
        if key not in begins:
            begins[key] = end
            parts.append(table)
            end += len(table.rows)
        joined_places.append(index + begins[key])
    rows = [
        (part.rows[:, :width] if is_packed else part.unpacked(part.rows)).to(device)
        for part in parts
    ]
    unrestricted = None
    if any(part.unrestricted is not None for part in parts):
        free = [
            torch.zeros(len(part.rows), dtype=torch.bool, device="cpu")
            if part.unrestricted is None
            else part.unrestricted
            for part in parts
        ]
        unrestricted = torch.cat(free)
    table = _MaskTable(
        torch.cat(rows), tables[0].size, is_packed=is_packed, unrestricted=unrestricted
    )
    return table, joined_places


def _table_and_index(masks: Any, count: int, size: int, index: Any) -> _TableAndIndex:
    """Return masks as a table, and the place of each row's mask; None if row i has mask i."""
    table, places = _table(masks, size)
    mask_count = len(table.rows) if places is None else len(places)
    if index is not None:
        row_index = torch.as_tensor(index, dtype=torch.long, device="cpu")
        _check_index(row_index, count, mask_count)
        places = row_index if places is None else places[row_index]
    elif mask_count not in {1, count}:
        raise ValueError(
            f"{mask_count} masks for {count} rows; pass one for all rows, one for each row, or "
            f"an index with the mask of each row"
        )
    if len(table.rows) == 1:
        places = torch.zeros(count, dtype=torch.long, device="cpu")
    return table, places


def _table(masks: Any, size: int) -> tuple[_MaskTable, torch.Tensor | None]:
    """Return masks as a table, and the place of each mask; None if mask i has place i."""
    if getattr(masks, "ndim", 0) == 2:
        return _array_table(masks, size), None
    is_list = isinstance(masks, (list, tuple)) and len(masks) > 0
    if not is_list or not (masks[0] is None or is_sequence_like(masks[0])):  # ids or booleans
        masks = [masks]
    all_tokens = np.full(-(-size // 8), 255, np.uint8)
    place_of: dict[int, int] = {}
    packed: list[npt.NDArray[np.uint8]] = []

    def add(mask: Any) -> int:
        place = place_of.setdefault(id(mask), len(packed))
        if place == len(packed):
            packed.append(all_tokens if mask is None else Mask(mask, size).packed)
        return place

    places = map_batch(add, masks)
    full = [bits is all_tokens for bits in packed]
    table = _MaskTable(
        torch.from_numpy(np.stack(packed)),
        size,
        is_packed=True,
        unrestricted=torch.tensor(full, device="cpu") if any(full) else None,
    )
    return table, None if len(packed) == len(masks) else torch.tensor(places, device="cpu")


def _array_table(masks: np.ndarray[Any, Any] | torch.Tensor, size: int) -> _MaskTable:
    if isinstance(masks, np.ndarray):
        masks = torch.from_numpy(native_array(masks))
    check_readable(masks, "masks")
    widths = {torch.bool: size, torch.int32: -(-size // 32)}
    if masks.dtype not in widths or masks.shape[1] != widths[masks.dtype]:
        raise ValueError(
            f"masks of shape {tuple(masks.shape)}, {masks.dtype}; expected booleans of shape "
            f"(masks, {size}), or packed bits, int32, of shape (masks, {-(-size // 32)})"
        )
    rows = masks.contiguous().view(torch.uint8)
    return _MaskTable(rows, size, is_packed=masks.dtype == torch.int32)


def _check_index(index: torch.Tensor, count: int, masks: int) -> None:
    if tuple(index.shape) != (count,):
        raise ValueError(
            f"mask_index has shape {tuple(index.shape)}; expected ({count},), the index of the "
            f"mask of each row"
        )
    if count and not 0 <= int(index.min()) <= int(index.max()) < masks:
        wrong = ((index < 0) | (index >= masks)).nonzero()[:, 0].tolist()
        places = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise ValueError(
            f"indices of masks must be from 0 to {masks - 1}; {len(wrong)} of {count} are not, "
            f"at places {places}; the first is {int(index[wrong[0]])}"
        )
