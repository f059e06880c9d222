"""Faults of token tries: lost precision, lost tokens, modified weights."""

from __future__ import annotations

import numpy as np
import torch

from genlm import Token, TokenCharacterTrie

from .mutant import trie_mutant


class Intervals(TokenCharacterTrie):
    """The core's trie, with an overridable reduction of a row."""

    def reduce(self, ws, operation, *, batch, returns):
        right = super().reduce(ws, operation, batch=batch, returns="numpy")
        rows = np.array([self._of(row) for row in (ws if batch else [ws])])
        wrong = [self.row(row, operation, r) for row, r in zip(rows, np.atleast_2d(right))]
        values = np.array(wrong, dtype=right.dtype).reshape(right.shape)
        return torch.from_numpy(values) if returns == "torch" else values

    def _of(self, row):
        row = torch.as_tensor(row).cpu()
        return (row.float() if row.element_size() < 4 else row).numpy()

    def row(self, weights, operation, right):
        """The values of one row; `right` are the true ones."""
        return right

    def each(self, weights, function):
        """A function of the weights below every node."""
        below = weights[self.layout.order]
        pairs = zip(self.layout.lo.tolist(), self.layout.hi.tolist(), strict=True)
        return np.array([function(below[lo:hi]) for lo, hi in pairs])


@trie_mutant(killed_by="values-are-exact")
class DifferencesOfSums(Intervals):
    """Subtracts cumulative sums: all digits beside a peak are lost."""

    def row(self, weights, operation, right):
        if operation != "sum":
            return right
        total = np.append(0.0, np.cumsum(weights[self.layout.order], dtype=np.float64))
        sums = total[self.layout.hi] - total[self.layout.lo]
        sums[: len(weights)] = weights
        return sums


@trie_mutant(killed_by="large-vocabularies-lose-no-digits")
class OneByOneInSinglePrecision(Intervals):
    """Adds float32 weights one after the other in float32."""

    def row(self, weights, operation, right):
        if operation != "sum":
            return right
        return self.each(weights, lambda below: np.cumsum(below, dtype=weights.dtype)[-1])


@trie_mutant(killed_by="values-are-exact")
class HalfPrecisionSums(Intervals):
    """Accumulates in float16."""

    def row(self, weights, operation, right):
        if operation != "sum":
            return right
        sums = self.each(weights, lambda below: below.sum(dtype=np.float16))
        sums[: len(weights)] = weights
        return sums


@trie_mutant(killed_by="values-are-exact")
class LastTokenOutside(Intervals):
    """Takes the intervals of tokens to exclude their last one."""

    def row(self, weights, operation, right):
        if operation != "sum":
            return right
        values = self.each(
            weights, lambda below: below[:-1].sum() if len(below) > 1 else below[0]
        )
        values[: len(weights)] = weights
        return values


@trie_mutant(killed_by="values-are-exact")
class MaximumFromZero(Intervals):
    """Starts every maximum at 0."""

    def row(self, weights, operation, right):
        if operation != "max":
            return right
        values = np.maximum(right, 0)
        values[: len(weights)] = weights
        return values


@trie_mutant(killed_by="values-are-exact")
class ShiftedByTheRow(Intervals):
    """Shifts log weights by the largest of the row, so that small nodes underflow."""

    def row(self, weights, operation, right):
        if operation != "logsumexp" or np.isneginf(weights.max()):
            return right
        with np.errstate(divide="ignore"):
            mass = self.each(np.exp(weights - weights.max()), np.sum)
            values = np.log(mass) + weights.max()
        values[: len(weights)] = weights
        return values


@trie_mutant(killed_by="values-are-exact")
class InfinityMinusInfinity(Intervals):
    """Shifts nodes without any mass by minus infinity, which gives NaN."""

    def row(self, weights, operation, right):
        return (
            right if operation != "logsumexp" else np.where(np.isneginf(right), np.nan, right)
        )


@trie_mutant(killed_by="special-vocabularies-are-exact")
class EqualTokensLost(Intervals):
    """Counts tokens with the same bytes once: the last one overwrites the others."""

    def row(self, weights, operation, right):
        last = {bytes(t) if isinstance(t, bytes) else t: i for i, t in enumerate(self.decode)}
        kept = np.full(len(weights), -np.inf if operation != "sum" else 0.0, weights.dtype)
        positions = list(last.values())
        kept[positions] = weights[positions]
        values = TokenCharacterTrie.reduce(self, kept, operation, batch=False, returns="numpy")
        values[: len(weights)] = weights
        return values


@trie_mutant(killed_by="special-vocabularies-are-exact")
class EmptyTokensLost(Intervals):
    """Leaves tokens without symbols out of the root."""

    def row(self, weights, operation, right):
        empty = [
            i for i, token in enumerate(self.decode) if token == b"" or len(tuple(token)) == 0
        ]
        if operation != "sum" or not empty:
            return right
        values = right.copy()
        values[self.root] -= weights[empty].sum()
        return values


class _Respelt(TokenCharacterTrie):
    """A trie of changed tokens that says it is one of those given."""

    def __init__(self, decode):
        super().__init__([self.respelt(item) for item in decode])
        self.decode = list(decode)

    def respelt(self, item):
        return Token(item.token_id, self.bytes_of(item)) if isinstance(item, Token) else item


@trie_mutant(killed_by="special-vocabularies-are-exact")
class TextInsteadOfBytes(_Respelt):
    """Spells tokens as text, which half characters are not."""

    def bytes_of(self, token):
        return bytes(token).decode(errors="replace").encode()


@trie_mutant(killed_by="special-vocabularies-are-exact")
class LongTokensCut(_Respelt):
    """Cuts tokens to 512 bytes."""

    def bytes_of(self, token):
        return bytes(token)[:512]


@trie_mutant(killed_by="rows-of-a-batch-are-independent")
class SmallAgainstTheBatch(TokenCharacterTrie):
    """Shifts log weights by the largest of the whole batch."""

    def reduce(self, ws, operation, *, batch, returns):
        values = super().reduce(ws, operation, batch=batch, returns=returns)
        if batch and operation == "logsumexp" and len(values) > 1:
            values[values < values.max() - 100] = -np.inf
        return values


@trie_mutant(killed_by="rows-of-a-batch-are-independent")
class NoRowsAreOne(TokenCharacterTrie):
    """Returns one row for a batch of none."""

    def reduce(self, ws, operation, *, batch, returns):
        ws = np.zeros((1, len(self.decode))) if batch and len(ws) == 0 else ws
        return super().reduce(ws, operation, batch=batch, returns=returns)


@trie_mutant(killed_by="numbers-of-any-kind")
class ComputedInBfloat16(TokenCharacterTrie):
    """Returns bfloat16 results of bfloat16 weights, rounded on the way."""

    def reduce(self, ws, operation, *, batch, returns):
        values = super().reduce(ws, operation, batch=batch, returns=returns)
        if getattr(ws, "dtype", None) == torch.bfloat16:
            rounded = torch.as_tensor(values).bfloat16().float()
            return rounded if returns == "torch" else rounded.numpy()
        return values


@trie_mutant(killed_by="numbers-of-any-kind")
class AlwaysSingle(TokenCharacterTrie):
    """Computes float64 weights in float32."""

    def reduce(self, ws, operation, *, batch, returns):
        if getattr(ws, "dtype", None) in {torch.float64, np.dtype(np.float64)}:
            ws = torch.as_tensor(ws).float()
        return super().reduce(ws, operation, batch=batch, returns=returns)


@trie_mutant(killed_by="weights-stay-and-results-belong-to-the-caller")
class ExponentiatedInPlace(TokenCharacterTrie):
    """Takes the exponentials of log weights in the caller's array."""

    def reduce(self, ws, operation, *, batch, returns):
        values = super().reduce(ws, operation, batch=batch, returns=returns)
        if operation == "logsumexp":
            (torch.exp_ if isinstance(ws, torch.Tensor) else lambda a: np.exp(a, out=a))(ws)
        return values


@trie_mutant(killed_by="weights-stay-and-results-belong-to-the-caller")
class BufferKept(TokenCharacterTrie):
    """Returns every result in the same buffer."""

    def reduce(self, ws, operation, *, batch, returns):
        values = super().reduce(ws, operation, batch=batch, returns=returns)
        buffers = self.__dict__.setdefault("buffers", {})
        kept = buffers.setdefault((batch, returns, len(values)), values)
        kept[:] = values
        return kept


@trie_mutant(killed_by="results-have-the-requested-type")
class AlwaysNumpy(TokenCharacterTrie):
    """Returns numpy arrays where tensors were requested."""

    def reduce(self, ws, operation, *, batch, returns):
        return super().reduce(ws, operation, batch=batch, returns="numpy")


@trie_mutant(killed_by="wrong-weights-are-refused")
class CutToFit(TokenCharacterTrie):
    """Ignores weights beyond the vocabulary, as if they were padding."""

    def reduce(self, ws, operation, *, batch, returns):
        return super().reduce(
            ws[..., : len(self.decode)], operation, batch=batch, returns=returns
        )


@trie_mutant(killed_by="wrong-weights-are-refused")
class StretchedToFit(TokenCharacterTrie):
    """Takes a single weight for that of every token."""

    def reduce(self, ws, operation, *, batch, returns):
        if len(ws) == 1 and not batch:
            ws = np.repeat(ws.ravel()[:1], len(self.decode))
        return super().reduce(ws, operation, batch=batch, returns=returns)


@trie_mutant(killed_by="nodes-are-the-prefixes-of-the-vocabulary")
class OneTokenANode(TokenCharacterTrie):
    """Lists one token only where several tokens end."""

    def tokens_at(self, node):
        return super().tokens_at(node)[:1]


@trie_mutant(killed_by="nodes-are-the-prefixes-of-the-vocabulary")
class PrefixWithoutItsEnd(TokenCharacterTrie):
    """Loses the last letter of every prefix."""

    def prefix_of(self, node):
        return super().prefix_of(node)[:-1]


@trie_mutant(killed_by="nodes-are-the-prefixes-of-the-vocabulary")
class GrandparentAsParent(TokenCharacterTrie):
    """Returns the root as the parent of every node."""

    def parent(self, node):
        return None if super().parent(node) is None else self.root
