"""`TrieTrial`: what a check of a token trie is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm.testing.enumeration import EXACT, Letters, below
from genlm.testing.failure import expect
from genlm.testing.profile import Profile
from genlm.testing.target import TrieTarget
from genlm.testing.trial import Trial

__all__ = ["TrieTrial"]

RELATIVE_ERROR = {"float32": 2e-6, "float64": 1e-13}
"""Largest error of a sum of weights that are not negative: a few units in the last place."""


class TrieTrial(Trial):
    """A trial of a token trie.

    Attributes:
        target: The trie under test.
        devices: On which results were seen.
    """

    def __init__(self, target: TrieTarget, profile: Profile, seed: int) -> None:
        super().__init__(profile, seed, target.patience_s)
        self.target = target
        self.devices: set[str] = set()

    def build(self, items: Sequence[Any]) -> Any:
        """The trie of a vocabulary."""
        return self.call(lambda: self.target.build(items))

    def weights(
        self, count: int, *, salt: int = 0, low: float = 0.0, high: float = 1.0
    ) -> torch.Tensor:
        """Weights decided by the seed, float32, on the CPU."""
        drawn = np.random.default_rng([self.seed, salt]).uniform(low, high, count)
        return torch.from_numpy(drawn.astype(np.float32))

    def reduced(self, trie: Any, ws: Any, operation: str, **options: Any) -> Any:
        """What the trie makes of one row of weights."""
        return self.call(lambda: getattr(trie, f"weight_{operation}")(ws, **options))

    def reduced_batch(self, trie: Any, ws: Any, operation: str, **options: Any) -> Any:
        """What the trie makes of several rows of weights."""
        return self.call(lambda: getattr(trie, f"batch_weight_{operation}")(ws, **options))

    def check_values(
        self, trie: Any, values: Any, weights: Any, operation: str, /, **example: Any
    ) -> None:
        """Raise `CheckFailure` unless every node has the exact value, within rounding.

        Args:
            trie: Whose nodes they are.
            values: One for each node: numpy, or torch on any device.
            weights: The row that was reduced: numpy or torch.
            operation: `"sum"`, `"max"` or `"logsumexp"`.
            **example: What to report beside the vocabulary and the weights.
        """
        found = np.asarray(_on_cpu(values))
        given = [float(weight) for weight in _on_cpu(weights)]
        items = trie.decode
        expect(found.shape == (len(trie),), f"{len(trie)} values", found.shape, **example)
        tokens_below = below(items)
        for letters, node in nodes_by_letters(trie).items():
            exact = EXACT[operation]([given[position] for position in tokens_below[letters]])
            limit = largest_error(operation, exact, str(found.dtype))
            value = float(found[node])
            expect(
                value == exact or (math.isfinite(value) and abs(value - exact) <= limit),
                f"{operation} {exact!r} at the node of {_shown(letters)}, within {limit:.1g}",
                repr(value),
                vocabulary=items,
                weights=given,
                **example,
            )
        for position, weight in enumerate(given):
            leaf = leaf_of(trie, position)
            expect(
                float(found[leaf]) == weight,
                f"the weight of token {position}, {weight!r}, at its leaf",
                float(found[leaf]),
                vocabulary=items,
                weights=given,
                **example,
            )


def largest_error(operation: str, exact: float, dtype: str) -> float:
    """How far from the exact value a result of a dtype may be."""
    if operation == "max":
        return 0.0
    # The log of a sum is as far off as the sum, and is itself rounded.
    scale = 1 + abs(exact) / 8 if operation == "logsumexp" else abs(exact)
    return RELATIVE_ERROR[dtype] * scale


def nodes_by_letters(trie: Any) -> dict[Letters, int]:
    """The node of every prefix, by walking `children` from the root; leaves left out."""
    found: dict[Letters, int] = {(): trie.root}
    waiting: list[Letters] = [()]
    while waiting:
        letters = waiting.pop()
        for edge, child in trie.children[found[letters]].items():
            if _is_letter(edge):
                found[(*letters, edge)] = child
                waiting.append((*letters, edge))
    expected = below(trie.decode)
    expect(
        found.keys() == expected.keys(),
        f"a path of `children` to each of {len(expected)} prefixes and to no other",
        f"{len(found)} paths; missing: {[_shown(each) for each in expected.keys() - found]}, "
        f"too many: {[_shown(each) for each in found.keys() - expected]}",
        vocabulary=trie.decode,
    )
    return found


def leaf_of(trie: Any, position: int) -> int:
    """The leaf of a token, from `word2leaf`."""
    item = trie.decode[position]
    token_id = getattr(item, "token_id", None)
    key = item if token_id is None else (bytes(item), token_id)
    leaf: int = trie.word2leaf[key]
    return leaf


def _is_letter(edge: Any) -> bool:
    """Whether an edge leads to a prefix; that to a leaf is `(None, position)`."""
    return not (isinstance(edge, tuple) and len(edge) == 2 and edge[0] is None)


def _shown(letters: Letters) -> str:
    try:
        return repr(bytes(letters))
    except (TypeError, ValueError):
        return repr(letters)


def _on_cpu(values: Any) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.element_size() < 4 else values).numpy()
