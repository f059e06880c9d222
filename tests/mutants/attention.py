"""A causal attention model of ten tokens: small, in float64, and evaluated in two ways.

`Attention.extend` adds one token to the keys and values of a prefix, as engines with a KV
cache do; `dense_row` evaluates a whole sequence at once under a mask, and is the oracle.
They share the weights and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

SIZE = 10  # ids of the vocabulary
WIDTH = 12  # logits of the model, padded as embeddings often are
MISSING = 6  # an id below SIZE that no token has
CONTEXT = 12
HIDDEN = 6
LAYERS = 2  # with one, keys and values would not depend on what came before them

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, each `(HIDDEN, HIDDEN)`."""

    query: Floats
    key: Floats
    value: Floats
    out: Floats


@dataclass(frozen=True)
class State:
    """Keys and values of a prefix, one pair `(length, HIDDEN)` per layer; never changed."""

    keys: tuple[Floats, ...]
    values: tuple[Floats, ...]

    def __len__(self) -> int:
        return len(self.keys[0])

    def cut(self, length: int) -> State:
        """The state of the first `length` tokens; shares the memory."""
        return State(
            tuple(keys[:length] for keys in self.keys),
            tuple(values[:length] for values in self.values),
        )


EMPTY = State(*[tuple(np.zeros((0, HIDDEN)) for _ in range(LAYERS))] * 2)


@dataclass(frozen=True)
class Attention:
    """The weights of the model, with an adapter's merged in if it is an adapted one."""

    embedding: Floats
    position: Floats
    layers: tuple[Layer, ...]
    head: Floats

    def extend(self, state: State, token_id: int, position: int) -> tuple[State, Floats]:
        """Append a token; returns the longer state and the token's last hidden vector."""
        hidden = self.embedding[token_id] + self.position[position]
        keys, values = [], []
        for layer, old_keys, old_values in zip(
            self.layers, state.keys, state.values, strict=True
        ):
            keys.append(np.vstack([old_keys, hidden @ layer.key]))
            values.append(np.vstack([old_values, hidden @ layer.value]))
            scores = keys[-1] @ (hidden @ layer.query)
            weights = np.exp(scores - scores.max())
            mixed = (weights / weights.sum()) @ values[-1]
            hidden = hidden + np.tanh(mixed @ layer.out)
        return State(tuple(keys), tuple(values)), hidden

    def logits(self, hidden: Floats) -> Floats:
        """Logits of the next token, shape `(WIDTH,)`."""
        logits: Floats = hidden @ self.head
        return logits

    def adapted(self, seed: int) -> Attention:
        """The model with low-rank changes of every value matrix and of the head."""
        draw = np.random.default_rng(seed).normal
        change = functools.partial(_low_rank, draw)
        layers = tuple(
            Layer(layer.query, layer.key, layer.value + change(HIDDEN), layer.out)
            for layer in self.layers
        )
        return Attention(self.embedding, self.position, layers, self.head + change(WIDTH))


def _low_rank(draw: Callable[..., Floats], width: int) -> Floats:
    change: Floats = draw(size=(HIDDEN, 1)) @ draw(size=(1, width))
    return change


@functools.cache
def base_model(seed: int = 0) -> Attention:
    """The weights without an adapter; another seed stands for a trained model."""
    draw = np.random.default_rng(seed).normal
    layers = tuple(
        Layer(*(draw(size=(HIDDEN, HIDDEN)) for _ in range(4))) for _ in range(LAYERS)
    )
    return Attention(
        draw(size=(WIDTH, HIDDEN)),
        draw(size=(CONTEXT, HIDDEN)),
        layers,
        draw(size=(HIDDEN, WIDTH)) / 2,
    )


ADAPTER_SEEDS = {"red": 1, "blue": 2}
"""The adapters that exist, by the path from which they are loaded."""


TRAINED = 9
"""The seed of other weights."""


@functools.cache
def _model(adapter: str | None, seed: int) -> Attention:
    base = base_model(seed)
    return base if adapter is None else base.adapted(ADAPTER_SEEDS[adapter])


def trained_row(token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
    """The true row with the other weights."""
    return dense_row(token_ids, adapter, TRAINED)


def dense_row(token_ids: Sequence[int], adapter: str | None, seed: int = 0) -> torch.Tensor:
    """The true row of a sequence: every position at once, under a causal mask."""
    model = _model(adapter, seed)
    hidden = torch.from_numpy(
        model.embedding[list(token_ids)] + model.position[: len(token_ids)]
    )
    future = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).triu(1)
    for layer in model.layers:
        query, key, value, out = (
            torch.from_numpy(w) for w in (layer.query, layer.key, layer.value, layer.out)
        )
        scores = ((hidden @ query) @ (hidden @ key).T).masked_fill(future, -torch.inf)
        hidden = hidden + torch.tanh(scores.softmax(-1) @ (hidden @ value) @ out)
    logits = (hidden[-1] @ torch.from_numpy(model.head))[:SIZE]
    logits[MISSING] = -torch.inf
    return logits.log_softmax(-1)
