"""Attention of steps by kernels, which read everything step-specific from device memory.

Steps are passes without prefill chunks. Each layer takes three launches: `kernels.attend` over
shared prefixes and over suffixes, and `kernels.combine`.
"""

from __future__ import annotations

import torch

from genlm_hf.packed.layout import AttentionLayer, AttentionLayout
from genlm_hf.packed.plan import Integers
from genlm_hf.packed.work_items import Sections, StepSize, power_of_two, sections
from genlm_hf.storage import KVStorage

# Rows of a tile of scores, and maximum number of query tokens of a tile.
_TILE_ROWS, _TILE_TOKENS = 64, 16

# The smallest side of a matrix product in Triton.
_MIN_SIDE = 16

# Explicit because Triton warns that the default will change.
_OPTIONS = {"enable_fp_fusion": True}

# Bytes of keys that a program reads at once.
_KEY_BYTES = 2**13

# Initial capacity, 2 MiB. When it grows, graphs are captured again.
_INITIAL_NUMBERS = 2**18


class StepMemory:
    """Memory of a device for the numbers of one step, which graphs read at one address.

    Numbers are written to main memory and copied without waiting for the device. The memory is
    pinned, because a copy from other memory waits for the operations before it.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._allocate(_INITIAL_NUMBERS)

    def reserve(self, count: int) -> bool:
        """Make room for `count` numbers; return whether memory was reallocated."""
        if count <= len(self._numbers):
            return False
        self._allocate(power_of_two(count))
        return True

    def write(self, numbers: Integers) -> None:
        """Copy numbers to the device, without waiting for it."""
        count = len(numbers)
        if self._copied is not None:
            self._copied.synchronize()  # the previous numbers were copied long ago
        self._source.numpy()[:count] = numbers
        self._numbers[:count].copy_(self._source[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _allocate(self, count: int) -> None:
        on_cuda = self._device.type == "cuda"
        self._source = torch.zeros(count, dtype=torch.int64, pin_memory=on_cuda)
        self._numbers = torch.zeros(count, dtype=torch.int64, device=self._device)

    def parts(self, size: StepSize) -> Sections[torch.Tensor]:
        """Return the parts of the memory that belong to a step of a size."""
        return Sections(*(self._numbers[section] for section in sections(size)))


def tile_of(layout: AttentionLayout) -> int:
    """Return the maximum number of query tokens of a shared prefix's work item."""
    heads = max(power_of_two(layer.queries_per_head) for layer in layout.layers)
    return max(1, min(_TILE_TOKENS, _TILE_ROWS // heads))


def keys_at_once(columns: int, itemsize: int) -> int:
    """Return the number of keys of `columns` columns that a program reads at once."""
    return min(64, max(_MIN_SIDE, _KEY_BYTES // (columns * itemsize)))


def step_attention(  # noqa: PLR0917 - as `Attend`
    storage: KVStorage,
    size: StepSize,
    tensors: Sections[torch.Tensor],
    layer: AttentionLayer,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Store the keys and values of a step, and attend to its work items."""
    query, key, value = states
    keys, values = storage.write(layer.index, tensors.writes, key, value)
    outputs, logsums = _attend(size, tensors, query, keys, values, layer=layer, scale=scale)
    return _combine(tensors, outputs, logsums, sinks, query)


def _attend(
    size: StepSize,
    tensors: Sections[torch.Tensor],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    layer: AttentionLayer,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of work items, (rows, heads, width), and the logs of their sums."""
    from genlm_hf.packed import kernels  # Triton is installed where steps are captured

    n_heads, _, width = query.shape
    if query.stride(2) != 1:
        query = query.contiguous()
    rows = size.prefix_items * size.tile + size.suffix_items
    outputs = query.new_empty((rows, n_heads, values.shape[2]), dtype=torch.float32)
    logsums = query.new_empty((rows, n_heads), dtype=torch.float32)
    per_head = layer.queries_per_head
    columns = max(_MIN_SIDE, power_of_two(width))
    for items, count, queries, first_row in (
        (tensors.prefix_items, size.prefix_items, size.tile, 0),
        (tensors.suffix_items, size.suffix_items, 1, size.prefix_items * size.tile),
    ):
        if count:
            kernels.attend[(count, len(keys))](
                query, keys, values, tensors.slots, tensors.positions, items, outputs, logsums,
                query.stride(0), query.stride(1), keys.stride(0), values.stride(0),
                n_heads, first_row, scale, layer.softcap or 0.0, layer.window or 0,
                PER_HEAD=per_head, KEY_WIDTH=width, VALUE_WIDTH=values.shape[2],
                QUERIES=queries, HEADS=power_of_two(per_head),
                ROWS=max(_MIN_SIDE, queries * power_of_two(per_head)),
                KEYS=keys_at_once(columns, keys.itemsize),
                KEY_COLUMNS=columns,
                VALUE_COLUMNS=max(_MIN_SIDE, power_of_two(values.shape[2])),
                SOFTCAP=layer.softcap is not None, WINDOW=layer.window is not None,
                **_OPTIONS,
            )  # fmt: skip
    return outputs, logsums


def _combine(
    tensors: Sections[torch.Tensor],
    outputs: torch.Tensor,
    logsums: torch.Tensor,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
) -> torch.Tensor:
    """Return the output of each query token, `(tokens, heads, width)`."""
    from genlm_hf.packed import kernels

    _, n_heads, width = outputs.shape
    n_tokens = query.shape[1]
    out = query.new_empty((n_tokens, n_heads, width))
    kernels.combine[(n_tokens, n_heads)](
        outputs, logsums, tensors.offsets, tensors.rows, out if sinks is None else sinks, out,
        n_heads, VALUE_WIDTH=width, VALUE_COLUMNS=max(_MIN_SIDE, power_of_two(width)),
        SINKS=sinks is not None, **_OPTIONS,
    )  # fmt: skip
    return out
