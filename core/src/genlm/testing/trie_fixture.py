"""`TrieFixture`: tries for a check of a token trie, and the comparison of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import torch

from genlm.testing.check import expect
from genlm.testing.fixture import Fixture
from genlm.testing.target import TrieTarget
from genlm.testing.trie_oracle import EXACT, Symbols, tokens_below

RELATIVE_ERROR = {"float32": 2e-6, "float64": 1e-13}
"""Maximum relative error of a sum of non-negative weights: a few units in the last place."""


class TrieFixture(Fixture):
    """Fixture of a check of a token trie.

    Attributes:
        target: The trie under test.
    """

    def __init__(self, target: TrieTarget, profile: hypothesis.settings, seed: int) -> None:
        super().__init__(profile, seed, target.timeout_s)
        self.target = target

    def build(self, items: Sequence[Any]) -> Any:
        """The trie of a vocabulary."""
        return self.call(self.target.build, items)

    def weights(
        self, count: int, *, salt: int = 0, low: float = 0.0, high: float = 1.0
    ) -> torch.Tensor:
        """Random weights from the seed, float32, on the CPU."""
        values = np.random.default_rng([self.seed, salt]).uniform(low, high, count)
        return torch.from_numpy(values.astype(np.float32))

    def reduce(self, trie: Any, ws: Any, operation: str, **options: Any) -> Any:
        """Reduce one row of weights."""
        return self.call(lambda: getattr(trie, f"weight_{operation}")(ws, **options))

    def reduce_nodes(
        self, trie: Any, ws: Any, nodes: Any, operation: str, **options: Any
    ) -> Any:
        """Reduce the weights below some nodes."""
        return self.call(lambda: getattr(trie, f"partial_{operation}")(ws, nodes, **options))

    def reduce_batch(self, trie: Any, ws: Any, operation: str, **options: Any) -> Any:
        """Reduce several rows of weights."""
        return self.call(lambda: getattr(trie, f"batch_weight_{operation}")(ws, **options))

    def check_values(
        self,
        trie: Any,
        values: Any,
        weights: Any,
        operation: str,
        /,
        nodes: Sequence[int] | None = None,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless every node has the exact value up to rounding.

        Args:
            trie: The trie.
            values: The value of each node: numpy, or torch on any device.
            weights: The row that was reduced: numpy or torch.
            operation: `"sum"`, `"max"` or `"logsumexp"`.
            nodes: The nodes of `values`; by default all, in their order.
            **example: Reported with the vocabulary and the weights.
        """
        count = len(trie) if nodes is None else len(nodes)
        expect(np.shape(values) == (count,), f"{count} values", np.shape(values), **example)
        expected_nodes = oracle_nodes(trie)
        results = np.asarray(_on_cpu(values))
        row = [float(weight) for weight in _on_cpu(weights)]
        indices = ((n, n) for n in expected_nodes) if nodes is None else enumerate(nodes)
        for index, number in indices:
            node, value = expected_nodes[number], float(results[index])
            exact = EXACT[operation]([row[position] for position in node.below])
            limit = 0.0 if node.leaf else largest_error(operation, exact, str(results.dtype))
            expect(
                value == exact or (math.isfinite(value) and abs(value - exact) <= limit),
                f"{operation} {exact!r} at {node.name}, within {limit:.1g}",
                repr(value),
                vocabulary=trie.decode,
                weights=row,
                **example,
            )


@dataclass(frozen=True)
class Node:
    """A node of the oracle.

    Attributes:
        name: Node name for messages.
        below: Positions of the tokens below it.
        leaf: Whether the node is the leaf of a token.
    """

    name: str
    below: Sequence[int]
    leaf: bool = False


def oracle_nodes(trie: Any) -> dict[int, Node]:
    """Every node, from an enumeration of the vocabulary and a walk from the root."""
    below = tokens_below(trie.decode)
    nodes = {
        node: Node(f"the node of {_format_symbols(symbols)}", below[symbols])
        for symbols, node in nodes_by_symbols(trie).items()
    }
    for leaf in range(len(trie.decode)):  # the leaf of a token is its position
        nodes[leaf] = Node(f"the leaf of token {leaf}", [leaf], leaf=True)
    return nodes


def largest_error(operation: str, exact: float, dtype: str) -> float:
    """Return the maximum error of a result of a dtype."""
    if operation == "max":
        return 0.0
    # The absolute error of the log is the sum's relative error, plus the log's rounding.
    scale = 1 + abs(exact) / 8 if operation == "logsumexp" else abs(exact)
    return RELATIVE_ERROR[dtype] * scale


def nodes_by_symbols(trie: Any) -> dict[Symbols, int]:
    """The node of every prefix, from a walk over `child_prefixes` from the root."""
    nodes: dict[Symbols, int] = {(): trie.root}
    waiting: list[Symbols] = [()]
    while waiting:
        symbols = waiting.pop()
        node = nodes[symbols]
        for symbol, child in zip(trie.child_symbols(node), trie.child_prefixes(node)):
            nodes[*symbols, symbol] = child
            waiting.append((*symbols, symbol))
    expected = tokens_below(trie.decode)
    expect(
        nodes.keys() == expected.keys(),
        f"a path to each of {len(expected)} prefixes and to no other",
        f"{len(nodes)} paths; missing: {[*map(_format_symbols, expected.keys() - nodes)]}, "
        f"too many: {[*map(_format_symbols, nodes.keys() - expected)]}",
        vocabulary=trie.decode,
    )
    return nodes


def _format_symbols(symbols: Symbols) -> str:
    try:
        return repr(bytes(symbols))
    except (TypeError, ValueError):
        return repr(symbols)


def _on_cpu(values: Any) -> Any:
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.element_size() < 4 else values).numpy()
