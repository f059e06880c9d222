"""Which tier serves a model: the prefix tree, if it gives the right rows.

It serves models whose layers keep plain keys and values of their past. Whether one is served
rightly is tested when it is loaded, against mlx-lm's own cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from genlm import Vocabulary
from genlm_mlx.rotary import PublishedRoPE
from genlm_mlx.tiers import GatheredTier, ServeOptions, Tier, UncachedTier
from genlm_mlx.unfit import UnfitModelError

__all__ = ["choose_tier"]

_logger = logging.getLogger("genlm_mlx")

# The self-test's longest text, in tokens, and the largest error in log-probability that it
# allows; half precision rounds more, differently in every batch.
_LONGEST = 24
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.3


def choose_tier(
    model: Any,
    vocabulary: Vocabulary,
    options: ServeOptions,
    *,
    max_context: int | None,
    known_ids: int,
    rotary: Sequence[PublishedRoPE] = (),
) -> tuple[Tier, float | None]:
    """Return the tier that serves a model, and its largest error in the self-test.

    Args:
        model: An mlx-lm model.
        vocabulary: The tokenizer's.
        options: How to serve.
        max_context: The most tokens that the model takes.
        known_ids: Ids up to here can be embedded.
        rotary: Embeddings of its that depend on the length of the context.

    Raises:
        UnfitModelError: The tier asked for cannot serve it.
    """
    uncached = UncachedTier(model, vocabulary, options, rotary)
    if options.tier == "uncached":
        return uncached, None
    tier: Tier
    error = None
    try:
        if rotary:
            raise UnfitModelError(
                f"beyond {rotary[0].longest} tokens its rotary embeddings depend on the length "
                f"of the context; max_context={rotary[0].longest} makes it fit"
            )
        tier = gathered = GatheredTier(
            model, vocabulary, options, max_context=max_context, uncached=uncached
        )
        if options.self_test:
            steps = _steps(range(min(_LONGEST, known_ids, max_context or _LONGEST)), known_ids)
            error = _largest_error(gathered, uncached, steps)
            gathered.clear()
    except UnfitModelError as unfit:
        if options.tier is not None:
            raise
        tier = uncached
        tier.reason = f"not gathered: {unfit}"
    _logger.info("%s is served by tier %r (%s)", type(model).__module__, tier.name, tier.reason)
    return tier, error


def _steps(text: Sequence[int], known_ids: int) -> list[list[tuple[int, ...]]]:
    """Mixed lengths; a fork, one and several new tokens; one token on."""
    long = tuple(text)
    middle = long[: max(1, len(long) // 2)]
    other = known_ids - 1
    first = [middle, long[:-2] or long, long[:2][::-1]]
    second = [middle, long[:-1] or long, (*middle[:-1], other)]
    return [list(dict.fromkeys(step)) for step in (first, second, [long, middle])]


def _largest_error(
    gathered: GatheredTier, uncached: UncachedTier, steps: Sequence[list[tuple[int, ...]]]
) -> float:
    """Return how far rows of the tree are from those of the model's own cache, one by one.

    Raises:
        UnfitModelError: Too far, or the tree's raised.
    """
    worst = 0.0
    for step in steps:
        expected = torch.cat([uncached.rows(None, [sequence]) for sequence in step])
        try:
            found = gathered.rows(None, step)
        except Exception as error:
            raise UnfitModelError(
                f"in the self-test it raised {type(error).__name__}: {error}"
            ) from error
        worst = max(worst, _difference(found, expected))
    allowed = _TOLERANCE if gathered.is_exact else _COARSE_TOLERANCE
    if not worst <= allowed:
        raise UnfitModelError(
            f"in the self-test its log-probabilities were off by {worst:.1e}, more than "
            f"{allowed:.1e}"
        )
    return worst


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    finite = expected.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    return float((found - expected)[finite].abs().max())
