"""`TrieTrial`: what a check of a token trie is given."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.testing.enumeration import EXACT, Letters, below
from genlm.testing.failure import NeverEnded, expect
from genlm.testing.profile import Profile
from genlm.testing.target import TrieTarget
from genlm.testing.trial import Trial

__all__ = ["TrieTrial", "known_nodes", "nodes_by_letters"]

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

    def at_end(self, function: Callable[[], object]) -> None:
        """Call a function when the trial ends, the last one first; if it hangs, leave it."""

        def end() -> None:
            with contextlib.suppress(NeverEnded):
                self.call(function)

        self._resources.callback(end)

    def weights(
        self, count: int, *, salt: int = 0, low: float = 0.0, high: float = 1.0
    ) -> torch.Tensor:
        """Weights decided by the seed, float32, on the CPU."""
        drawn = np.random.default_rng([self.seed, salt]).uniform(low, high, count)
        return torch.from_numpy(drawn.astype(np.float32))

    def reduced(self, trie: Any, ws: Any, operation: str, **options: Any) -> Any:
        """What the trie makes of one row of weights."""
        return self.call(lambda: getattr(trie, f"weight_{operation}")(ws, **options))

    def reduced_some(
        self, trie: Any, ws: Any, nodes: Any, operation: str, **options: Any
    ) -> Any:
        """What the trie makes of the weights below some nodes."""
        return self.call(lambda: getattr(trie, f"partial_{operation}")(ws, nodes, **options))

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
        expect(len(values) == len(trie), f"{len(trie)} values", len(values), **example)
        known = known_nodes(trie)
        every = np.asarray(_on_cpu(values))[list(known)]
        self._check(trie, list(known.values()), every, weights, operation, **example)

    def check_nodes(
        self,
        trie: Any,
        nodes: Sequence[int],
        values: Any,
        weights: Any,
        operation: str,
        /,
        **example: Any,
    ) -> None:
        """Do what `check_values` does for some nodes, whose values are `values`."""
        known = known_nodes(trie)
        chosen = [known[node] for node in nodes]
        self._check(trie, chosen, np.asarray(_on_cpu(values)), weights, operation, **example)

    def _check(
        self,
        trie: Any,
        nodes: Sequence[Node],
        found: npt.NDArray[Any],
        weights: Any,
        operation: str,
        /,
        **example: Any,
    ) -> None:
        expect(found.shape == (len(nodes),), f"{len(nodes)} values", found.shape, **example)
        given = [float(weight) for weight in _on_cpu(weights)]
        for node, value in zip(nodes, map(float, found)):
            exact = EXACT[operation]([given[position] for position in node.below])
            limit = 0.0 if node.leaf else largest_error(operation, exact, str(found.dtype))
            expect(
                value == exact or (math.isfinite(value) and abs(value - exact) <= limit),
                f"{operation} {exact!r} at {node.name}, within {limit:.1g}",
                repr(value),
                vocabulary=trie.decode,
                weights=given,
                **example,
            )


@dataclass(frozen=True)
class Node:
    """What is known of a node.

    Attributes:
        name: Says which, in words.
        below: Positions of the tokens below it.
        leaf: Whether it is that of one whole token.
    """

    name: str
    below: Sequence[int]
    leaf: bool = False


def known_nodes(trie: Any) -> dict[int, Node]:
    """Every node, by enumerating the vocabulary and walking `children` and `word2leaf`."""
    tokens_below = below(trie.decode)
    found = {
        node: Node(f"the node of {_shown(letters)}", tokens_below[letters])
        for letters, node in nodes_by_letters(trie).items()
    }
    for position in range(len(trie.decode)):
        leaf = leaf_of(trie, position)
        found[leaf] = Node(f"the leaf of token {position}", [position], leaf=True)
    return found


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
