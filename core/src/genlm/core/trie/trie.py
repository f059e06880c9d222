"""`TokenCharacterTrie`: reduces weights of tokens to weights of all their prefixes.

The class combines the other modules: `layout` builds the trie, `reductions` reduces over
all nodes and `partial` over some, `navigation` looks up nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.base.arrays import host_array, signed_index
from genlm.core.base.error_handling import import_required
from genlm.core.base.errors import VocabularyError
from genlm.core.base.forking import cached_property
from genlm.core.trie.compiled import compiled_take, use_compiled
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.navigation import Navigation
from genlm.core.trie.partial import partial_weights
from genlm.core.trie.reductions import Operation, reduce_rows
from genlm.core.trie.segment_tree import SegmentTree
from genlm.core.trie.symbols import Symbols
from genlm.core.trie.visualisation import dot_source, node_values, visible_nodes
from genlm.core.trie.weights import (
    Returns,
    Rows,
    check_returns,
    convert_result,
    numpy_rows,
    read_rows,
)


class TokenCharacterTrie(Navigation):
    """The trie of the byte prefixes of a vocabulary, and reductions of weights over its nodes.

    Every prefix of a token is a node, and every token has a leaf below the node of its
    last symbol; tokens with equal bytes have a leaf each. `TrieLayout` documents the
    numbering: leaf `i` is token `decode[i]`, children precede parents, the root is the last
    node. Weights are indexed by the position in `decode`, results by node.

    Weights are never changed, and the caller owns the results. float32, bfloat16 and
    float16 give float32 results; float64 and integers give float64. Sums are computed in
    float64 over a balanced tree, without subtraction. A NaN or an infinity affects only the
    nodes above its token. Instances may be shared between threads.

    A trie for another device derives from this class and overrides `reduce_rows` and, for
    selected nodes, `reduce_nodes`.

    Args:
        decode: Tokens, bytes, or other iterables of hashable symbols (for example an
            end-of-sequence object that yields itself); or an object with `byte_vocab`.
        compiled: Whether reductions of all nodes use code compiled by numba, which gives
            equal results, bit for bit. None uses it for large tries (200,000 nodes, about
            50,000 tokens) if numba is installed; the first such trie of a process takes a
            second or two longer to build.

    Attributes:
        decode: The vocabulary as a list.
        compiled: Whether reductions of all nodes use compiled code.

    Raises:
        MissingRequirementError: `compiled` is True and numba cannot be imported.
        VocabularyError: `decode` is not a vocabulary, or is empty; an item cannot be
            iterated, or occurs twice (tokens with equal bytes are the same item only if their
            ids are equal).
    """

    def __init__(self, decode: Any, *, compiled: bool | None = None) -> None:
        self.decode: list[Any] = _items(decode)
        symbols = Symbols.of(self.decode)
        super().__init__(TrieLayout.build(symbols), symbols.objects)
        _check_distinct(self.decode, self.layout)
        self.compiled = use_compiled(compiled, len(self))

    def visualize(self, ws: Any = None, *, max_nodes: int = 200) -> Any:
        """Visualise the trie with Graphviz.

        Args:
            ws: The weight of each node, `(len(trie),)`, shown as colour; by default the number
                of tokens below the node.
            max_nodes: Maximum number of nodes to show, those of largest weight. The others are
                collapsed into one mark below their parent.

        Returns:
            A `graphviz.Source` of format `svg`, which `.render("file")` writes and a notebook
            displays. Rendering requires the program `dot`.

        Raises:
            WeightsError: The number of weights differs from the number of nodes.
            ValueError: `max_nodes` is less than 1.
            MissingRequirementError: The Python package `graphviz` is not installed.
        """
        values = node_values(self, ws)
        source = dot_source(self, values, visible_nodes(self, values, max_nodes))
        graphviz = import_required("graphviz", "visualize", "genlm-core[draw]")
        return graphviz.Source(source, format="svg")

    # -- all nodes ----------------------------------------------------------------------

    def weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum the weights of the tokens below every node.

        Args:
            ws: One weight for each token, `(len(decode),)`, numpy or torch.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            One value for each node, `(len(trie),)`.

        Raises:
            WeightsError: The weights have another shape, or are not real numbers.
        """
        return self.reduce(ws, "sum", batch=False, returns=returns)

    def weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weight below every node; arguments as for `weight_sum`."""
        return self.reduce(ws, "max", batch=False, returns=returns)

    def weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Compute the logsumexp of the log-weights below every node; as `weight_sum`."""
        return self.reduce(ws, "logsumexp", batch=False, returns=returns)

    def batch_weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum the weights of several rows.

        The result of a row does not depend on the other rows.

        Args:
            ws: `(rows, len(decode))`, numpy or torch, or a sequence of rows.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            One row of node values for each row of weights, `(rows, len(trie))`.

        Raises:
            WeightsError: The weights have another shape, or are not real numbers.
        """
        return self.reduce(ws, "sum", batch=True, returns=returns)

    def batch_weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weights of several rows; arguments as for `batch_weight_sum`."""
        return self.reduce(ws, "max", batch=True, returns=returns)

    def batch_weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Compute the logsumexp for several rows; arguments as for `batch_weight_sum`."""
        return self.reduce(ws, "logsumexp", batch=True, returns=returns)

    def reduce(self, ws: Any, operation: Operation, *, batch: bool, returns: Returns) -> Any:
        """Implement the six methods above."""
        check_returns(returns)
        rows = read_rows(ws, self.layout.n_tokens, (2,) if batch else (1,))
        values = self.reduce_rows(rows, operation)
        return convert_result(values if batch else values[0], returns, rows)

    def reduce_rows(self, rows: Rows, operation: Operation) -> Rows:
        """Reduce rows over all nodes; a trie for another device overrides it.

        Args:
            rows: Real numbers of any dtype, `(rows, n_tokens)`, numpy or torch on any device;
                not to be changed.
            operation: `"sum"`, `"max"` or `"logsumexp"`.

        Returns:
            `(rows, n_nodes)`, numpy or torch, in separate memory. numpy is converted to a
            tensor on the device of the weights if the caller requested a tensor.
        """
        weights = numpy_rows(rows)
        out = np.empty((len(weights), self.layout.n_nodes), weights.dtype)
        take = compiled_take() if self.compiled else None
        reduce_rows(self._segment_tree, operation, weights, out, take)
        return out

    @cached_property
    def _segment_tree(self) -> SegmentTree:
        return SegmentTree.of(self.layout, np.uint32 if self.compiled else np.int64)

    # -- some nodes ---------------------------------------------------------------------

    def partial_sum(
        self, ws: Any, nodes: Sequence[int] | npt.NDArray[Any], *, returns: Returns = "numpy"
    ) -> Any:
        """Sum the weights below some nodes, in time O(tokens below them).

        For the children of a node pass `child_prefixes(node)`, for a path `path(prefix)`.
        Nodes may be in any order, nested or repeated.

        Args:
            ws: `(len(decode),)` or `(rows, len(decode))`, numpy or torch. Only the
                weights of tokens below the nodes are read.
            nodes: The nodes, `(k,)`.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            The values of `weight_sum` at these nodes up to rounding, `(k,)` or `(rows, k)`.

        Raises:
            WeightsError: The weights have another shape, or are not real numbers.
            IndexError: A node does not exist.
            TypeError: A node is not an integer.
        """
        return self.reduce_some(ws, nodes, "sum", returns=returns)

    def partial_max(
        self, ws: Any, nodes: Sequence[int] | npt.NDArray[Any], *, returns: Returns = "numpy"
    ) -> Any:
        """Find the largest weight below some nodes; arguments as for `partial_sum`."""
        return self.reduce_some(ws, nodes, "max", returns=returns)

    def partial_logsumexp(
        self, ws: Any, nodes: Sequence[int] | npt.NDArray[Any], *, returns: Returns = "numpy"
    ) -> Any:
        """Compute the logsumexp of the log-weights below some nodes; as `partial_sum`."""
        return self.reduce_some(ws, nodes, "logsumexp", returns=returns)

    def reduce_some(
        self,
        ws: Any,
        nodes: Sequence[int] | npt.NDArray[Any],
        operation: Operation,
        *,
        returns: Returns,
    ) -> Any:
        """Implement the three methods above."""
        check_returns(returns)
        valid = self._node_array(nodes)
        rows = read_rows(ws, self.layout.n_tokens, (1, 2))
        values = self.reduce_nodes(rows, valid, operation)
        return convert_result(values[0] if np.ndim(ws) == 1 else values, returns, rows)

    def reduce_nodes(
        self, rows: Rows, nodes: npt.NDArray[np.int64], operation: Operation
    ) -> Rows:
        """Reduce rows over some nodes that exist, `(rows, len(nodes))`; see `reduce_rows`."""
        return partial_weights(self.layout, rows, nodes, operation)

    def _node_array(self, nodes: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        array = host_array(nodes, "nodes")
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"nodes must be integers; found {nodes!r}")
        array = signed_index(array).astype(np.int64, copy=False).reshape(-1)
        if len(array):
            self._check_node(int(array.min()))
            self._check_node(int(array.max()))
        return array


def _items(vocabulary: Any) -> list[Any]:
    items = getattr(vocabulary, "byte_vocab", vocabulary)
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
        raise VocabularyError(
            f"found {vocabulary!r}; a trie is built from tokens or bytes, or from an object "
            f"with byte_vocab"
        )
    return list(items)


def _check_distinct(decode: Sequence[Any], layout: TrieLayout) -> None:
    """Raise `VocabularyError` if an item occurs twice; equal items are adjacent if sorted."""
    end = layout.parent[layout.order]
    equal = np.flatnonzero(end[1:] == end[:-1])
    position_of: dict[Hashable, int] = {}
    ranks = np.union1d(equal, equal + 1)
    for position in np.sort(layout.order[ranks]).tolist():
        item = decode[position]
        first = position_of.setdefault(_key(item), position)
        if first != position:
            raise VocabularyError(
                f"Duplicate word in vocabulary: items {first} and {position} are both "
                f"{item!r}; tokens that share bytes need distinct ids: "
                f"Token(token_id, byte_string)"
            )


def _key(item: Any) -> Hashable:
    """Return an item, or a tuple of its type and symbols if it is not hashable."""
    try:
        hash(item)
    except (TypeError, ValueError):  # ValueError: a memoryview that can be written
        return type(item), tuple(item)
    key: Hashable = item
    return key
