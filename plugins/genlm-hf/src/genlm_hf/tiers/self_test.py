"""Compares a tier with unbatched forward passes of short sequences, at loading.

It shows whatever short sequences can show: state that leaks between the sequences
of a pass, forgotten biases, wrong positions, short windows. What takes thousands
of tokens (long windows, scaling of positions) is the business of the rules.

Its cost is bounded: at most nine unbatched passes of no more than 24 tokens, and
three steps of the tier over the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm_hf.probe import sample_ids
from genlm_hf.quantised import is_quantised
from genlm_hf.tiers.padded import PaddedTier
from genlm_hf.tiers.tier import PrefixTier, ServedModel, Tier
from genlm_hf.unfit import UnfitModelError

__all__ = ["SelfTest"]

_LONGEST = 24

# In log-probability. Half precision and few bits round more, differently in every batch.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 3e-2}
_COARSE_TOLERANCE = 0.3

# A large model rounds more than a small one; padding shows how much.
_ROUNDING_FACTOR = 4


class SelfTest:
    """Sequences, and the rows that a tier must give for them.

    Args:
        served: The model.
        padded: Runs it unbatched.
    """

    def __init__(self, served: ServedModel, padded: PaddedTier) -> None:
        self._steps = _steps(_text(served))
        self._oracle = {
            sequence: padded.rows(None, [sequence])[0]
            for sequence in sorted({s for step in self._steps for s in step})
        }
        known = {} if is_quantised(served.model) else _TOLERANCE
        self._tolerance = known.get(served.model.dtype, _COARSE_TOLERANCE)
        batch = max(self._steps, key=len)
        rounding = _largest_difference(padded.rows(None, batch), self._expected(batch))
        self._tolerance = max(self._tolerance, _ROUNDING_FACTOR * rounding)

    def largest_error(self, tier: Tier) -> float:
        """Return how far a tier's rows are from unbatched ones; it forgets them again.

        Raises:
            UnfitModelError: Too far, or the tier raised.
        """
        worst = 0.0
        for step in self._steps:
            try:
                rows = tier.rows(None, step)
            except Exception as error:
                raise UnfitModelError(
                    f"in the self-test it raised {type(error).__name__}: {error}"
                ) from error
            worst = max(worst, _largest_difference(rows, self._expected(step)))
        if not worst <= self._tolerance:
            raise UnfitModelError(
                f"in the self-test its log-probabilities were off by {worst:.1e}, more than "
                f"{self._tolerance:.1e}"
            )
        if isinstance(tier, PrefixTier):
            tier.clear()
        return worst

    def _expected(self, step: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return torch.stack([self._oracle[sequence] for sequence in step])


def _text(served: ServedModel) -> list[int]:
    known = min(served.embedding_rows, served.vocabulary.size)
    ids = sample_ids(served.vocabulary.tokenizer, known, served.max_context)
    longest = min(_LONGEST, served.max_context or _LONGEST)
    return (ids * _LONGEST)[:longest]


def _steps(text: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Mixed lengths; a fork, one and several new tokens, one again; all one token on."""
    long, other = tuple(text), text[0]
    short, middle = long[:2], long[: max(1, len(long) // 2)]
    first = [middle, long[:-2] or long, (*reversed(short),)]
    second = [middle, long[:-1] or long, (*middle[:-1], other), (*short, other)[: len(long)]]
    third = [long, middle[: max(1, len(middle) - 2)]]
    return [list(dict.fromkeys(step)) for step in (first, second, third)]


def _largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    finite = right.isfinite()
    if not torch.equal(left.isfinite(), finite):
        return float("inf")
    return float((left - right)[finite].abs().max())
