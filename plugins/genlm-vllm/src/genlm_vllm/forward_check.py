"""Comparison of a model's rows with an unbatched forward pass of transformers, at loading.

The families of `docs/vllm-architectures.md` were compared on the CPU. Kernels of other devices
differ, and one model is compared at the cost of loading its weights a second time, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from genlm.plugin import free_memory_bytes

__all__ = ["forward_problem"]

Ids = tuple[int, ...]

_LENGTHS = (1, 7, 40, 70)
"""Lengths of the compared sequences: within a KV block, and through several."""

_MOST_DIVERGENCE = {torch.float32: 1e-5}
_MOST_DIVERGENCE_OF_HALF = 2e-2
"""Largest Kullback-Leibler divergence in nats of a row from the reference. Rounding to bfloat16
in each layer causes 1e-4 to 1e-3; a wrong mask, position or activation more than 0.1."""


def forward_problem(
    config: Any,
    built: Sequence[Mapping[str, Any]],
    rows_of: Callable[[Sequence[Ids]], Sequence[Any]],
    vocab_size: int,
) -> str | None:
    """Return how rows differ from those of transformers, None if they agree.

    Args:
        config: A `vllm.ModelConfig`.
        built: `RowWorker.genlm_describe_model` of each worker.
        rows_of: Returns the row, or the error, of each of some sequences, computed together.
        vocab_size: Number of ids of a row.
    """
    needed = 4 * sum(part["parameters"] for part in built)
    free = free_memory_bytes()
    if needed > free:
        return (
            f"the comparison needs {needed / 2**30:.1f} GiB of main memory, of which "
            f"{free / 2**30:.1f} GiB are free"
        )
    longest = config.max_model_len - 2
    prompts = _prompts(vocab_size, [min(length, longest) for length in _LENGTHS])
    # Contexts that are extended, beside prompts: both ways in which vLLM computes.
    asked = [*prompts, *((*prompt, 1) for prompt in prompts)]
    found = [*rows_of(asked[: len(prompts)]), *rows_of(asked[len(prompts) :])]
    most = _MOST_DIVERGENCE.get(config.dtype, _MOST_DIVERGENCE_OF_HALF)
    try:
        expected = _reference_rows(config, asked, vocab_size)
    except Exception as error:  # noqa: BLE001 - a model that transformers lacks, for one
        return f"transformers does not compute its rows: {type(error).__name__}: {error}"
    for ids, row, reference in zip(asked, found, expected, strict=True):
        if isinstance(row, Exception):
            return f"the row of {len(ids)} tokens failed: {row}"
        divergence = float((reference.exp() * (reference - row.cpu())).nansum())
        if not divergence <= most:
            return (
                f"the row of {len(ids)} tokens diverges by {divergence:.2g} nats from an "
                f"unbatched float32 forward pass of transformers, more than {most:g}"
            )
    return None


def _prompts(vocab_size: int, lengths: Sequence[int]) -> list[Ids]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())
        for length in lengths
    ]


@torch.inference_mode()
def _reference_rows(config: Any, asked: Sequence[Ids], vocab_size: int) -> list[torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=torch.float32,
    ).eval()
    return [
        model(torch.tensor([ids]), use_cache=False).logits[0, -1, :vocab_size].log_softmax(-1)
        for ids in asked
    ]
