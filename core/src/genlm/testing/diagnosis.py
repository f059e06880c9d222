"""`diagnose_row`: a hint at the cause of a wrong row, which is often the row of other ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from genlm.testing.comparison import largest_difference
from genlm.testing.target import TokenTuple


def diagnose_row(
    row: torch.Tensor,
    token_ids: TokenTuple,
    adapter: str | None,
    *,
    others: Sequence[TokenTuple],
    adapters: Collection[str],
    oracle: Callable[[TokenTuple, str | None], torch.Tensor],
    limit: float,
) -> str:
    """Describe a wrong row as the row of another sequence or adapter, if it is one.

    Args:
        row: The row that an engine returned.
        token_ids: The requested sequence.
        adapter: The requested adapter.
        others: Other sequences of the failing example.
        adapters: Names of the adapters.
        oracle: Returns the expected row of a sequence and an adapter.
        limit: Largest difference of two rows that count as equal.

    Returns:
        A hint, or an empty string.
    """
    expected = oracle(token_ids, adapter)
    if row.shape != expected.shape:
        return ""
    for ids, name, relation in _candidates(token_ids, adapter, others, adapters):
        if largest_difference(row, oracle(ids, name)) <= limit:
            subject = f"the row of {ids}" + ("" if name is None else f" with adapter {name!r}")
            return f"it is {subject}, {relation}"
    difference = (row.detach().cpu().double() - expected).mean()
    if largest_difference(row.cpu().double() - difference, expected) <= limit:
        return f"every log-probability is off by {float(difference):.2g}: not normalised"
    return ""


def _candidates(
    token_ids: TokenTuple,
    adapter: str | None,
    others: Sequence[TokenTuple],
    adapters: Collection[str],
) -> Iterator[tuple[TokenTuple, str | None, str]]:
    """Yield sequences, adapters and their relation to the request; the likeliest come first."""
    for name in (None, *adapters):
        if name != adapter:
            relation = "the base model" if name is None else "another adapter"
            yield token_ids, name, f"as {relation} computes it"
    for other in others:
        if other != token_ids:
            yield other, adapter, "another sequence of the same example"
    for count in range(1, len(token_ids)):
        yield token_ids[:-count], adapter, f"without the last {_tokens(count)}"
    for count in range(1, len(token_ids)):
        yield token_ids[count:], adapter, f"without the first {_tokens(count)}"
    longest = max(map(len, (token_ids, *others)))
    for other in (token_ids, *others):
        for prefix in (other, other[:-1]):
            ids = (*prefix, token_ids[-1])
            if ids != token_ids and len(ids) <= longest:
                yield ids, adapter, "the last token after the state of other tokens"


def _tokens(count: int) -> str:
    return "token" if count == 1 else f"{count} tokens"
