"""The Triton kernels of vLLM's second model runner as loops that numba compiles, for CPUs.

Triton does not compile for CPUs, so the speed of this runner cannot be measured there without
them. genlm-backend 0.3.1 requires this runner of vLLM 0.26; `genlm-vllm` supports it in vLLM
0.32. `install` replaces the kernels of generation without speculative decoding with functions
that have the same inputs and outputs. The installed files of vLLM are not changed.
"""

# ruff: noqa: SLF001 - kernels are private functions of vLLM
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

_compiled = numba.njit(cache=False, nogil=True)


class _Kernel:
    """Called as Triton's kernels are: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **named: self._function(grid, *arguments, **named)

    def warmup(self, *_arguments: Any, **_named: Any) -> None:
        """Nothing is compiled in advance."""


@_compiled
def _write(output: Any, rows: Any, starts: Any, values: Any, ends: Any, count: int) -> None:
    for place in range(count):
        begin = ends[place - 1] if place > 0 else 0
        row, start = rows[place], starts[place]
        for i in range(begin, ends[place]):
            output[row, start + i - begin] = values[i]


def _apply_write(
    grid: Any, output: Any, _stride: int, rows: Any, starts: Any, values: Any, ends: Any,
    *_more: Any, **_named: Any,
) -> None:  # fmt: skip
    found = output.numpy()
    found = found.reshape(-1, 1) if found.ndim == 1 else found
    _write(found, rows.numpy(), starts.numpy(), values.numpy(), ends.numpy(), grid[0])


@_compiled
def _prefill(
    inputs: Any, following: Any, rows: Any, starts: Any, tokens: Any, lengths: Any, done: Any
) -> None:
    for place in range(rows.shape[0]):
        row = rows[place]
        length, begin = lengths[row], done[row]
        if begin >= length:
            continue
        start = starts[place]
        count = starts[place + 1] - start
        for i in range(count):
            inputs[start + i] = tokens[row, begin + i]
        if begin + count < length:
            following[row] = tokens[row, begin + count]


def _prepare_prefill(
    _grid: Any, inputs: Any, following: Any, *arguments: Any, **_named: Any
) -> None:
    # vLLM 0.32 stores several following tokens for speculative decoding, otherwise one.
    rows, starts, tokens, _stride, lengths, done = arguments[-6:]
    _prefill(
        inputs.numpy(), following.numpy().reshape(-1), rows.numpy(), starts.numpy(),
        tokens.numpy(), lengths.numpy(), done.numpy(),
    )  # fmt: skip


@_compiled
def _positions(positions: Any, lengths: Any, rows: Any, starts: Any, done: Any) -> None:
    count = rows.shape[0]
    for place in range(count):
        begin, start = done[rows[place]], starts[place]
        new = starts[place + 1] - start
        lengths[place] = begin + new
        for i in range(new):
            positions[start + i] = begin + i
    for place in range(count, lengths.shape[0]):
        lengths[place] = 0


def _prepare_positions(
    _grid: Any, positions: Any, lengths: Any, rows: Any, starts: Any, done: Any, *_more: Any,
    **_named: Any,
) -> None:  # fmt: skip
    _positions(*(each.numpy() for each in (positions, lengths, rows, starts, done)))


@_compiled
def _combined(
    inputs: Any, rows: Any, last: Any, starts: Any, lengths: Any, prompts: Any, ends: Any,
    logits: Any, sampled: int,
) -> None:  # fmt: skip
    for place in range(rows.shape[0]):
        first = ends[place]
        count = ends[place + 1] - first
        begin = starts[place + 1] - count
        for i in range(count):
            logits[first + i] = begin + i
        row = rows[place]
        is_generated = lengths[place] > prompts[row] and lengths[place] - count >= prompts[row]
        if is_generated and sampled > 0:
            inputs[begin] = last[row]


def _combine(
    _grid: Any, inputs: Any, rows: Any, last: Any, starts: Any, lengths: Any, prompts: Any,
    _draft: Any, _stride: int, ends: Any, logits: Any, **named: Any,
) -> None:  # fmt: skip
    arrays = (inputs, rows, last, starts, lengths, prompts, ends, logits)
    found = [each.numpy() for each in arrays]
    found[2] = found[2].reshape(-1)
    _combined(*found, named.get("NUM_NEW_SAMPLED_TOKENS", 1))


@_compiled
def _counted(
    sampled: Any, rejected: Any, lengths: Any, ends: Any, rows: Any, prompts: Any
) -> None:
    for place in range(rows.shape[0]):
        is_chunk = lengths[place] < prompts[rows[place]]
        if is_chunk:
            sampled[place] = 0
            rejected[place] = 0
        else:
            rejected[place] = ends[place + 1] - ends[place] - sampled[place]


def _count(_grid: Any, *arrays: Any, **_named: Any) -> None:
    _counted(*(each.numpy() for each in arrays[:6]))


@_compiled
def _updated(
    rows: Any, done: Any, last: Any, sampled: Any, counts: Any, rejected: Any, starts: Any,
    tokens: Any, totals: Any,
) -> None:  # fmt: skip
    for place in range(rows.shape[0]):
        row = rows[place]
        if row < 0:
            continue
        total, count = totals[row], counts[place]
        if count > 0:
            last[row] = sampled[place, count - 1]
            totals[row] = total + count
        for i in range(count):
            tokens[row, total + i] = sampled[place, i]
        computed = starts[place + 1] - starts[place] if starts.shape[0] else 0
        done[row] += computed - rejected[place]


def _update(
    _grid: Any, rows: Any, done: Any, last: Any, bins: Any, _bins_stride: int, sampled: Any,
    _stride: int, counts: Any, rejected: Any, starts: Any, tokens: Any, _tokens_stride: int,
    totals: Any, **_named: Any,
) -> None:  # fmt: skip
    begins = np.zeros(0, np.int32) if starts is None else starts.numpy()
    _updated(
        rows.numpy(), done.numpy(), last.numpy().reshape(-1), sampled.numpy(), counts.numpy(),
        rejected.numpy(), begins, tokens.numpy(), totals.numpy(),
    )  # fmt: skip
    if bins is not None and bins.numel() > bins.shape[0]:  # occurrences, for penalties
        for row, count, new in zip(
            rows.tolist(), counts.tolist(), sampled.tolist(), strict=True
        ):
            for token in new[:count]:
                bins[row, token] += 1


@_compiled
def _add_computed(rows: Any, done: Any, starts: Any) -> None:
    for place in range(rows.shape[0]):
        done[rows[place]] += starts[place + 1] - starts[place]


@_compiled
def _gathered(rows: Any, blocks: Any, output: Any, counts: Any, padded: int) -> None:
    for place in range(padded):
        if place >= rows.shape[0]:
            output[place, :] = 0
        else:
            row = rows[place]
            for i in range(counts[row]):
                output[place, i] = blocks[row, i]


@_compiled
def _mapped(
    slots: Any, rows: Any, starts: Any, positions: Any, blocks: Any, size: int, padding: int
) -> None:
    count = rows.shape[0]
    for place in range(count):
        for i in range(starts[place], starts[place + 1]):
            position = positions[i]
            block = np.int64(blocks[rows[place], position // size])
            slots[i] = block * size + position % size
    for i in range(starts[count], slots.shape[0]):
        slots[i] = padding


def _gather_block_tables(
    self: Any, idx_mapping: Any, num_reqs_padded: int, out: Any = None, out_ptrs: Any = None
) -> Any:
    del out_ptrs
    tables = tuple(self.input_block_tables) if out is None else out
    for group in range(self.num_kv_cache_groups):
        blocks, counts = self.block_tables[group].gpu, self.num_blocks.gpu[group]
        arrays = (each.numpy() for each in (idx_mapping, blocks, tables[group], counts))
        _gathered(*arrays, num_reqs_padded)
    return tuple(table[:num_reqs_padded] for table in tables)


def _temperature(logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor) -> None:
    found = temperatures[rows.long()]
    logits.div_(torch.where(found == 0, 1.0, found)[:, None])


def _gumbel_sample(
    logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor, seeds: Any,
    positions: Any, apply_temperature: bool, *_more: Any, **_named: Any,
) -> torch.Tensor:  # fmt: skip
    del seeds, positions  # other random numbers of the same distribution
    found = temperatures[rows.long()]
    if bool((found == 0).all()):
        return logits.argmax(-1)
    values = logits.float()
    if apply_temperature:
        values = values / torch.where(found == 0, 1.0, found)[:, None]
    # An exponential race, as the first runner samples on CPUs.
    drawn = values.softmax(-1).div_(torch.empty_like(values).exponential_()).argmax(-1)
    return torch.where(found == 0, logits.argmax(-1), drawn)


def install() -> None:
    """Replace the kernels, before an engine is built; the environment selects the runner."""
    import vllm.config.vllm
    import vllm.triton_utils
    import vllm.v1.worker.cpu.shm
    from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
    from vllm.v1.worker.gpu.sample import gumbel, sampler, states

    vllm.config.vllm.HAS_TRITON = True  # for a check of the configuration only
    vllm.triton_utils.triton.next_power_of_2 = lambda n: 1 << max(0, n - 1).bit_length()
    buffer_utils._apply_write_kernel = _Kernel(_apply_write)
    input_batch._prepare_prefill_inputs_kernel = _Kernel(_prepare_prefill)
    input_batch._prepare_pos_seq_lens_kernel = _Kernel(_prepare_positions)
    input_batch._combine_sampled_and_draft_tokens_kernel = _Kernel(_combine)
    input_batch._get_num_sampled_and_rejected_kernel = _Kernel(_count)
    input_batch._post_update_kernel = _Kernel(_update)
    input_batch._post_update_num_computed_tokens_kernel = _Kernel(
        lambda _grid, *arrays: _add_computed(*(each.numpy() for each in arrays))
    )

    def compute_slot_mappings(
        self: Any,
        idx_mapping: Any,
        query_start_loc: Any,
        positions: Any,
        num_tokens_padded: int,
        out: Any = None,
    ) -> Any:
        mappings = self.slot_mappings if out is None else out
        inputs = [each.numpy() for each in (idx_mapping, query_start_loc, positions)]
        sizes = getattr(self, "kernel_block_sizes", self.block_sizes)  # vLLM 0.26
        for group in range(self.num_kv_cache_groups):
            blocks, size = self.block_tables[group].gpu.numpy(), sizes[group]
            _mapped(mappings[group].numpy(), *inputs, blocks, size, block_table.PAD_SLOT_ID)
        return mappings[:, :num_tokens_padded]

    block_table.BlockTables.gather_block_tables = _gather_block_tables
    block_table.BlockTables.compute_slot_mappings = compute_slot_mappings
    states.apply_temperature = _temperature
    gumbel.gumbel_sample = sampler.gumbel_sample = _gumbel_sample
