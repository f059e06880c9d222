"""How far two engines' rows of the same contexts are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from genlm.cli.comparison.contexts import Context
from genlm.core.sampling import draw_tokens, stream_uniform

__all__ = ["Differences", "differences"]


@dataclass(frozen=True)
class Differences:
    """Rows of one engine against those of the first.

    Attributes:
        largest: The largest difference of a log-probability.
        where: The context that has it.
        total_variation: Of the two distributions, at most 1; the largest.
        mean_total_variation: Over all contexts.
        same_greedy: Share of contexts with the same most likely token.
        same_draw: Share of contexts where one random number draws the same token.
        repeats: The largest difference to the engine's own rows, asked a second time in
            another order.
        rows: How many contexts were compared.
    """

    largest: float
    where: str
    total_variation: float
    mean_total_variation: float
    same_greedy: float
    same_draw: float
    repeats: float
    rows: int


def differences(
    contexts: Sequence[Context],
    expected: np.ndarray[Any, Any],
    found: np.ndarray[Any, Any],
    seed: int,
) -> Differences:
    """Compare rows.

    Args:
        contexts: What was asked.
        expected: The first engine's rows, shape `(2, contexts, vocab_size)`: both times.
        found: The other engine's, of the same shape.
        seed: Of the draws.
    """
    size = len(contexts)
    apart = np.array(
        [max(_largest(expected[0][i], row[i]) for row in found) for i in range(size)]
    )
    variations = np.array([_total_variation(expected[0][i], found[0][i]) for i in range(size)])
    worst = int(np.argmax(apart))
    kind, ids = contexts[worst]
    pairs = [(expected[0][i], found[0][i]) for i in range(size)]
    return Differences(
        largest=float(apart[worst]),
        where=f"{kind}, {len(ids)} tokens",
        total_variation=float(variations.max()),
        mean_total_variation=float(variations.mean()),
        same_greedy=float(np.mean([a.argmax() == b.argmax() for a, b in pairs])),
        same_draw=float(
            np.mean([_draw(a, seed, i) == _draw(b, seed, i) for i, (a, b) in enumerate(pairs)])
        ),
        repeats=max(_largest(found[0][i], found[1][i]) for i in range(size)),
        rows=size,
    )


def _largest(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Largest difference; ids that are impossible in both rows do not differ."""
    differ = left != right  # -inf minus itself is not a number
    return float(np.abs(left[differ] - right[differ]).max(initial=0.0))


def _total_variation(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    return float(np.abs(np.exp(left.astype(float)) - np.exp(right.astype(float))).sum() / 2)


def _draw(row: np.ndarray[Any, Any], seed: int, place: int) -> int:
    uniform = stream_uniform(seed, place)
    return int(draw_tokens(torch.from_numpy(row)[None], [1.0], [uniform]))
