"""Drawing the next token of many requests at once, each from its own randomness.

SGLang's sampler overwrites logits in place, may draw ids that the tokenizer does not have,
and honours seeds in one mode only; the engine draws itself, inside SGLang's batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["UniformStream", "draw_tokens"]


class UniformStream:
    """Uniform numbers in `[0, 1)`, addressed by their position.

    By position, because SGLang may compute a token twice (after a retraction, or one that
    an overlapped step had in flight): the same token must then be drawn again.

    Args:
        seed: Decides all numbers; None takes fresh entropy.
    """

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)
        self._numbers: list[float] = []

    def __getitem__(self, position: int) -> float:
        missing = position + 1 - len(self._numbers)
        if missing > 0:
            self._numbers += self._generator.random(missing).tolist()
        return self._numbers[position]


def draw_tokens(
    logprobs: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> torch.Tensor:
    """Draw one id per row, with probability proportional to `exp(logprobs / temperature)`.

    By inversion of the cumulative distribution in float64, on the rows' device, so row and
    number decide the id whatever else is in the batch. At temperature 0 the most likely id,
    the lowest of equals.

    Args:
        logprobs: Shape `(n, vocab_size)`; not changed.
        temperatures: One per row, finite and not negative.
        uniforms: One number in `[0, 1)` per row.

    Returns:
        Ids, int64, shape `(n,)`, on the device of `logprobs`.
    """
    device = logprobs.device
    greedy = logprobs.argmax(-1)
    if not any(temperatures):
        return greedy
    logits = logprobs.double()
    divisors = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64).to(device)
    # The largest becomes 0 before the division, which could take all of them to -inf.
    logits = (logits - logits.max(-1, keepdim=True).values) / divisors[:, None]
    cumulative = torch.softmax(logits, dim=-1).cumsum(-1)
    numbers = torch.tensor(uniforms, dtype=torch.float64).to(device)
    drawn = torch.searchsorted(cumulative, cumulative[:, -1:] * numbers[:, None], right=True)
    cold = torch.tensor([t == 0 for t in temperatures]).to(device)
    return torch.where(cold, greedy, drawn[:, 0])
