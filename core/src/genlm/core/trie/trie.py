"""`TokenCharacterTrie`: weights of tokens become weights of all their prefixes.

The class joins what the other modules do: `layout` and `segments` compute, `navigation`
finds nodes, `partial` reduces below a few of them, `views` shows all as dictionaries.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from genlm.core.errors import MissingRequirementError, VocabularyError
from genlm.core.trie.drawing import dot_source, node_values, sketch
from genlm.core.trie.layout import TrieLayout
from genlm.core.trie.letters import Letters
from genlm.core.trie.partial import partial_weights
from genlm.core.trie.reducer import Reducer
from genlm.core.trie.reductions import Operation
from genlm.core.trie.storage import StoredTrie, load_trie, save_trie
from genlm.core.trie.views import Views, check_keys
from genlm.core.trie.weights import Returns, Weights

__all__ = ["TokenCharacterTrie"]


class TokenCharacterTrie(Views):
    """A vocabulary as a trie of letters, and reductions of weights over it.

    Every prefix of a token is a node, and every token has a leaf below the node of its
    last letter; tokens with the same bytes have a leaf each. `TrieLayout` says how nodes
    are numbered: leaf `i` is token `decode[i]`, children come before parents, the root is
    last. Weights are indexed by the position in `decode`, results by node.

    The weights given are never changed, and results are the caller's own. float32,
    bfloat16 and float16 give float32 results; float64 and integers give float64. Sums are
    added in float64 as a balanced tree, without subtraction. A nan or an infinity reaches
    the nodes above its token and no other. Instances may be shared between threads.

    If numba is installed, reductions of all nodes run in part as machine code once the trie
    has reduced so many weights that compiling pays; results are the same bit for bit.

    Args:
        decode: Tokens, bytes, or other iterables of hashable letters (an end-of-sequence
            object that yields itself, for example); or anything with a `byte_vocab`.
        compiled: True to use machine code from the start, False never to.

    Attributes:
        decode: The vocabulary as a list.

    Raises:
        MissingRequirementError: `compiled` is True and numba cannot be imported.
        VocabularyError: It is no vocabulary or empty, an item has no letters, or an item
            occurs twice (tokens with the same bytes are the same item only if they share
            their id).
    """

    def __init__(self, decode: Any, *, compiled: bool | None = None) -> None:
        self.decode: list[Any]
        if isinstance(decode, StoredTrie):
            self.decode = decode.decode
            super().__init__(decode.layout, decode.letter_objects)
        else:
            self.decode = _items(decode)
            letters = Letters.of(self.decode)
            super().__init__(TrieLayout.build(letters), letters.objects)
            check_keys(self.decode, self.layout)
        self._reducer = Reducer(self.layout, compiled)

    @property
    def compiled(self) -> bool:
        """Whether reductions of all nodes run in part as machine code by now."""
        return self._reducer.compiled

    def visualize(self, ws: Any = None, *, max_nodes: int = 200) -> Any:
        """Draw the trie; an SVG with `.render("file")` or in a notebook.

        Args:
            ws: The weight of each node, `(len(trie),)`, shown as colour; None takes the
                number of tokens below.
            max_nodes: About how many nodes to draw. The heaviest are drawn, the others
                folded into one mark below their parent.

        Returns:
            A `graphviz.Source` of format `svg`. Rendering it needs the program `dot`.

        Raises:
            WeightsError: There is not one weight for each node.
            ValueError: `max_nodes` is less than 1.
            MissingRequirementError: The Python package `graphviz` is not installed.
        """
        source = dot_source(sketch(self, node_values(self, ws), max_nodes), self)
        try:
            import graphviz
        except ImportError as error:
            raise MissingRequirementError(
                "visualize", ["graphviz"], "pip install genlm-core[draw]"
            ) from error
        return graphviz.Source(source, format="svg")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trie to a file for `load`, without pickle.

        Items that are neither tokens nor bytes are not in the file.
        """
        save_trie(path, self.decode, self.layout)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        decode: Sequence[Any] | None = None,
        **options: Any,
    ) -> Self:
        """Read a trie that `save` wrote.

        Args:
            path: Of the file.
            decode: The vocabulary; needed only if it has items that are neither tokens
                nor bytes, and then compared with the trie in the file.
            **options: Further arguments of the class.

        Raises:
            VocabularyError: The vocabulary is missing or another one, or the file is not
                a trie of this format.
            OSError: The file cannot be read.
        """
        return cls(load_trie(path, decode), **options)

    # -- all nodes ----------------------------------------------------------------------

    def weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum the weights of the tokens below every node.

        Args:
            ws: One weight for each token, `(len(decode),)`, numpy or torch.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            One value for each node, `(len(trie),)`.

        Raises:
            WeightsError: The shape or the kind of number is another.
        """
        return self.reduce(ws, "sum", batch=False, returns=returns)

    def weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weight below every node, negative ones too; as `weight_sum`."""
        return self.reduce(ws, "max", batch=False, returns=returns)

    def weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Add log-weights below every node, in the log domain; as `weight_sum`."""
        return self.reduce(ws, "logsumexp", batch=False, returns=returns)

    def batch_weight_sum(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Sum each of several rows of weights.

        A row's result does not depend on the rows beside it.

        Args:
            ws: `(rows, len(decode))`, numpy or torch, or a sequence of rows.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            One row of node values for each row of weights, `(rows, len(trie))`.

        Raises:
            WeightsError: The shape or the kind of number is another.
        """
        return self.reduce(ws, "sum", batch=True, returns=returns)

    def batch_weight_max(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Find the largest weights of several rows; as `batch_weight_sum`."""
        return self.reduce(ws, "max", batch=True, returns=returns)

    def batch_weight_logsumexp(self, ws: Any, *, returns: Returns = "numpy") -> Any:
        """Add the log-weights of several rows; as `batch_weight_sum`."""
        return self.reduce(ws, "logsumexp", batch=True, returns=returns)

    def reduce(self, ws: Any, operation: Operation, *, batch: bool, returns: Returns) -> Any:
        """Do what the six methods above do; the one method another device overrides."""
        weights = (Weights.of_batch if batch else Weights.of)(ws, self.layout.n_tokens)
        out = np.empty((len(weights.rows), self.layout.n_nodes), weights.rows.dtype)
        self._reducer.reduce(operation, weights.rows, out)
        return weights.deliver(out if batch else out[0], returns)

    # -- some nodes ---------------------------------------------------------------------

    def partial_sum(
        self, ws: Any, nodes: Sequence[int] | npt.NDArray[Any], *, returns: Returns = "numpy"
    ) -> Any:
        """Sum the weights below some nodes, in time O(tokens below them).

        For the children of a node pass `child_prefixes(node)`, for a path `path(prefix)`;
        any other nodes will do, in any order, nested or repeated.

        Args:
            ws: `(len(decode),)` or `(rows, len(decode))`, numpy or torch. Only the
                weights of tokens below the nodes are read.
            nodes: Which, `(k,)`.
            returns: `"torch"` for a tensor on the device of the weights.

        Returns:
            The values `weight_sum` has for these nodes, `(k,)` or `(rows, k)`, to within
            rounding.

        Raises:
            WeightsError: The shape or the kind of number is another.
            IndexError: There is no such node.
            TypeError: A node that is no integer.
        """
        return self.reduce_some(ws, self._valid(nodes), "sum", returns=returns)

    def partial_max(
        self, ws: Any, nodes: Sequence[int] | npt.NDArray[Any], *, returns: Returns = "numpy"
    ) -> Any:
        """Find the largest weight below some nodes; as `partial_sum`."""
        return self.reduce_some(ws, self._valid(nodes), "max", returns=returns)

    def partial_logsumexp(
        self, ws: Any, nodes: Sequence[int] | npt.NDArray[Any], *, returns: Returns = "numpy"
    ) -> Any:
        """Add the log-weights below some nodes; as `partial_sum`."""
        return self.reduce_some(ws, self._valid(nodes), "logsumexp", returns=returns)

    def reduce_some(
        self, ws: Any, nodes: npt.NDArray[np.int64], operation: Operation, *, returns: Returns
    ) -> Any:
        """Do what the three methods above do, for nodes that exist; to override as well."""
        result, read = partial_weights(self.layout, ws, nodes, operation)
        single = np.ndim(ws) == 1
        return read.deliver(result[0] if single else result, returns)

    def _valid(self, nodes: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        chosen = np.asarray(nodes)
        if chosen.dtype.kind not in "iu" and chosen.size:
            raise TypeError(f"nodes are integers; found {nodes!r}")
        chosen = chosen.astype(np.int64, copy=False).reshape(-1)
        if len(chosen):
            self._checked(int(chosen.min()))
            self._checked(int(chosen.max()))
        return chosen


def _items(vocabulary: Any) -> list[Any]:
    items = getattr(vocabulary, "byte_vocab", vocabulary)
    if not isinstance(items, Iterable):
        raise VocabularyError(
            f"found {vocabulary!r}; a trie is made of tokens or bytes, or of something with a "
            f"byte_vocab of them"
        )
    return list(items)
