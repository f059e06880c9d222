"""Draws, masses and normalisers of logits on a GPU, by Triton kernels that read them once.

torch's operations read and write all entries several times. The kernels need a few numbers for
each block of ids instead, so 1,000 rows over 128,000 ids are one part. They do not wait for the
device.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any, NamedTuple

import torch

from genlm.core.base.errors import describe_error
from genlm.core.rows.logits import moved
from genlm.core.rows.row_weights import RowWeights

_logger = logging.getLogger("genlm")

_SIZE = 512
"""Number of adjacent ids of a block."""

_BLOCKS = 4
"""Number of blocks that a program sums. Sums of 1,000 rows of 128,000 bfloat16 with a mask each
take 0.27 ms on an H100 with 4 blocks and 0.39 with 1; without masks 0.18 and 0.23."""

_OPTIONS = {"enable_fp_fusion": True}
"""Explicit because Triton warns that the default will change."""


class _BlockSums(NamedTuple):
    """Sums of the blocks of some rows, and the arguments of the kernels."""

    tops: torch.Tensor
    """Shape `(2, rows, blocks)`; see `row_kernels.sum_blocks`."""
    sums: torch.Tensor
    """Shape `(3, rows, blocks)`."""
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def has_kernels(values: torch.Tensor, weights: RowWeights | None = None) -> bool:
    """Whether kernels compute draws and masses of these rows or logits with these weights.

    torch computes draws at temperature 0 and draws with a truncation.
    """
    if not _can_run_kernels(values.device):
        return False
    return weights is None or not (weights.is_greedy or weights.is_truncated(values.shape[1]))


@functools.cache
def _can_run_kernels(device: torch.device) -> bool:
    """Whether Triton compiles the kernels for a device, and they return the right token."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        logits = torch.tensor([[0.0, 9.0, 0.0]], device=device)
        token_ids = draw_on_device(logits, torch.tensor([0.5]).double(), None)[0].tolist()
    except Exception as error:  # noqa: BLE001 - torch computes the same
        problem = describe_error(error)
    else:
        if token_ids == [1]:
            return True
        problem = f"drew {token_ids} instead of [1]"
    _logger.warning("draws on %s are computed without Triton kernels: %s", device, problem)
    return False


def draw_on_device(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    weights: RowWeights | None,
    *,
    row_of: torch.Tensor | None = None,
    sources: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens in proportion to the weights of rows; return the columns of `DrawnTokens`.

    A row that is not a distribution, or has a bias of nan or infinity, has token -1 and nan.

    Args:
        logits: Logits or log-probabilities, shape `(m, vocab_size)`, any floating dtype.
        uniforms: Random numbers in [0, 1), float64, one per draw.
        weights: Weights of the tokens of n rows; None for the unchanged probabilities.
        row_of: The row of each draw, int64; by default draw i is from row i.
        sources: Index of each row's logits, shape `(n,)`, int64; by default row i has logits i.
    """
    device, count = logits.device, len(uniforms)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        blocks = _sum_blocks(logits, weights, sources)
        places = _device_indices(row_of, count, device)
        token_ids = torch.empty(count, dtype=torch.int64, device=device)
        columns = torch.empty((3, count), dtype=torch.float32, device=device)
        if count:
            from genlm.core.rows import row_kernels

            n_blocks = blocks.tops.shape[2]
            row_kernels.draw_tokens[(count,)](
                *blocks.arguments, moved(uniforms, device), places, token_ids, *columns,
                **blocks.constants, BLOCKS=1 << (n_blocks - 1).bit_length(),
            )  # fmt: skip
    logprobs, log_mass, draw_logprob = columns
    if weights is not None and not blocks.constants["BIASED"]:
        unrestricted = None if weights.masks is None else weights.masks.unrestricted
        if unrestricted is not None:
            log_mass.masked_fill_(moved(unrestricted, device)[places], 0.0)
        _, offset = weights.device_biases(device)
        if offset is not None:
            log_mass += offset if len(offset) == 1 else offset[places]
    return token_ids, logprobs, log_mass, draw_logprob


def log_sums_on_device(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logsumexp and the maximum of each row of logits, shape `(n,)`, float32."""
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        blocks = _sum_blocks(logits, None, None)
    tops, sums = blocks.tops[0], blocks.sums[0]
    return (tops + sums.log()).logsumexp(-1), tops.amax(-1)


def _sum_blocks(
    logits: torch.Tensor, weights: RowWeights | None, sources: torch.Tensor | None
) -> _BlockSums:
    """Sum the blocks of all rows."""
    from genlm.core.rows import row_kernels  # Triton is installed where there are GPUs

    device, n_ids = logits.device, logits.shape[1]
    count = len(logits) if sources is None else len(sources)
    n_blocks = -(-n_ids // _SIZE)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tops, sums = (logits.new_empty((n, count, n_blocks), dtype=torch.float32) for n in (2, 3))
    bias = mask = mask_rows = temperatures = None
    is_packed = False
    if weights is not None:
        bias, _ = weights.device_biases(device)
        bias = None if bias is None else bias.contiguous()
        temperatures = weights.device_temperatures(device)
        if weights.masks is not None:
            mask, mask_rows, is_packed = weights.masks.bits(device)
    tensors = (bias, mask, mask_rows, temperatures)
    arguments = (
        logits, *(sums if tensor is None else tensor for tensor in tensors),
        _device_indices(sources, count, device), tops, sums,
        n_ids, n_blocks, logits.stride(0), 0 if bias is None or len(bias) == 1 else n_ids,
        0 if mask is None else mask.shape[1], count * n_blocks,
    )  # fmt: skip
    constants = {
        "BIASED": bias is not None,
        "MASKED": mask is not None,
        "PACKED": is_packed,
        "TEMPERED": temperatures is not None,
        "SIZE": _SIZE,
        **_OPTIONS,
    }
    if count:
        programs = count * -(-n_blocks // _BLOCKS)
        row_kernels.sum_blocks[(programs,)](*arguments, **constants, BLOCKS=_BLOCKS)
    return _BlockSums(tops, sums, arguments, constants)


def _device_indices(
    indices: torch.Tensor | None, count: int, device: torch.device
) -> torch.Tensor:
    """Return indices on a device; None stands for `0 ... count - 1`."""
    return torch.arange(count, device=device) if indices is None else moved(indices, device)
