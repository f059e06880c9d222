"""Comparison of a model's rows at loading with unbatched forward passes of transformers.

The families of `docs/vllm-architectures.md` were compared on the CPU. Other devices use other
kernels. The comparison loads the weights of the model a second time, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from genlm.plugin import describe_error, free_memory_bytes

Ids = tuple[int, ...]

_LENGTHS = (1, 7, 40, 70)
"""Lengths of the compared sequences: up to one KV block, and several."""

_MAX_DIVERGENCE, _MAX_HALF_DIVERGENCE = 1e-5, 2e-2
"""Maximum Kullback-Leibler divergence in nats of a row from the reference. Rounding to bfloat16
in every layer causes 1e-4 to 1e-3; a wrong mask, position or activation more than 0.1."""


def forward_problem(
    config: Any,
    descriptions: Sequence[Mapping[str, Any]],
    rows_of: Callable[[Sequence[Ids]], Sequence[Any]],
    vocab_size: int,
) -> str | None:
    """Return how rows differ from those of transformers, None if they agree.

    Args:
        config: A `vllm.ModelConfig`.
        descriptions: `RowWorker.genlm_describe_model` of each worker.
        rows_of: Function that computes the rows of sequences together and returns the row, or
            the error, of each.
        vocab_size: Number of ids of a row.
    """
    required = 4 * sum(part["parameters"] for part in descriptions)
    free = free_memory_bytes()
    if required > free:
        return (
            f"the comparison needs {required / 2**30:.1f} GiB of main memory, of which "
            f"{free / 2**30:.1f} GiB are free"
        )
    longest = config.max_model_len - 2
    prompts = _prompts(vocab_size, [min(length, longest) for length in _LENGTHS])
    # vLLM computes prompts and extensions of contexts in different ways.
    sequences = [*prompts, *((*prompt, 1) for prompt in prompts)]
    rows = [*rows_of(sequences[: len(prompts)]), *rows_of(sequences[len(prompts) :])]
    limit = _MAX_DIVERGENCE if config.dtype == torch.float32 else _MAX_HALF_DIVERGENCE
    try:
        expected = _reference_rows(config, sequences, vocab_size)
    except Exception as error:  # noqa: BLE001 - such as a model that transformers lacks
        return f"transformers does not compute its rows: {describe_error(error)}"
    for ids, row, reference in zip(sequences, rows, expected, strict=True):
        if isinstance(row, Exception):
            return f"the row of {len(ids)} tokens failed: {row}"
        divergence = float((reference.exp() * (reference - row.cpu())).nansum())
        if not divergence <= limit:
            return (
                f"the row of {len(ids)} tokens diverges by {divergence:.2g} nats from an "
                f"unbatched float32 forward pass of transformers, more than {limit:g}"
            )
    return None


def _prompts(vocab_size: int, lengths: Sequence[int]) -> list[Ids]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())
        for length in lengths
    ]


@torch.inference_mode()
def _reference_rows(
    config: Any, sequences: Sequence[Ids], vocab_size: int
) -> list[torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=torch.float32,
    ).eval()
    return [
        model(torch.tensor([ids]), use_cache=False).logits[0, -1, :vocab_size].log_softmax(-1)
        for ids in sequences
    ]
