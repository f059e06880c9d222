"""Published caches: `OutputCache`, based on the core's, and the tree of rows `TokenTrie`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

import genlm

__all__ = ["OutputCache", "TokenTrie"]


class OutputCache(genlm.OutputCache):
    """Maps to `genlm.OutputCache`, with the published argument names and `cache[key]`.

    Rows are copied when they are stored and returned. Overwriting a row evicts no other row.

    Args:
        maxsize: Maximum number of rows; 0 disables the cache.
        move_to_cpu: Store rows in main memory; `get` returns them on their original device.
        max_bytes: Maximum size in bytes; None for no limit.
    """

    def __init__(
        self, maxsize: int, move_to_cpu: bool = False, *, max_bytes: int | None = None
    ) -> None:
        super().__init__(maxsize, max_bytes=max_bytes, move_to_cpu=move_to_cpu)

    @property
    def maxsize(self) -> int:
        """Maximum number of rows."""
        return self.max_entries

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        row: torch.Tensor | None = self.get(key)
        if row is None:
            raise KeyError(key)
        return row

    def __setitem__(self, key: Hashable, value: torch.Tensor) -> None:
        self.put(key, value)


class TokenTrie:
    """A tree of token sequences with a row of log-probabilities at each node.

    Models do not use it, because engines cache prefixes themselves.
    `AsyncTransformer.walk_cache` returns cached rows in this form.

    Attributes:
        children: Nodes of the sequences that are one token longer, by token id.
        logprobs: Row of this sequence; None if unknown.
        past_key_values: Set by the caller.
    """

    def __init__(self, logprobs: torch.Tensor | None = None) -> None:
        self.children: dict[int, TokenTrie] = {}
        self.logprobs = logprobs
        self.past_key_values: Any = None

    def __repr__(self) -> str:
        mark = "*" if self.past_key_values is not None else ""
        return f"{type(self).__name__}{mark}({', '.join(map(str, self.children))})"

    def clear_kv_cache(self) -> None:
        """Remove `past_key_values` of this node and all its descendants."""
        pending = [self]
        while pending:
            node = pending.pop()
            node.past_key_values = None
            pending.extend(node.children.values())

    def has_token(self, token_id: int) -> bool:
        """Whether the node has a child for this token."""
        return token_id in self.children

    def get_token(self, token_id: int) -> TokenTrie:
        """Return the child for a token.

        Raises:
            KeyError: There is no such child.
        """
        return self.children[token_id]

    def add_token(self, token_id: int, logprobs: torch.Tensor | None = None) -> TokenTrie:
        """Return the child for a token, which is added if it does not exist."""
        node = self.children.setdefault(token_id, TokenTrie())
        if logprobs is not None:
            node.logprobs = logprobs
        return node

    def extend_cache(
        self, next_token_index: int, token_ids: Sequence[int], logits: torch.Tensor, base: int
    ) -> TokenTrie:
        """Add the nodes of `token_ids[next_token_index:]` with their rows.

        Args:
            next_token_index: Length of this node's sequence.
            token_ids: The whole sequence.
            logits: Logits; row `i` belongs to token `base + i`.
            base: Index of the token of row 0.

        Returns:
            The last node.
        """
        node = self
        for index in range(next_token_index, len(token_ids)):
            row = torch.log_softmax(logits[index - base], 0, dtype=torch.float32)
            node = node.add_token(int(token_ids[index]), row.cpu())
        return node
