"""Comparison of an engine's rows with expected rows: sequences, requests and differences.

`genlm compare` expects the rows of another engine, `measure_family` those of an unbatched
forward pass, and the checks those of a target's oracle.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from genlm.plugin import describe_error, draw_tokens, stream_uniform
from genlm.testing.target import TokenTuple

if TYPE_CHECKING:
    from genlm import AsyncLM

RowsByRequest = Sequence[tuple[TokenTuple, torch.Tensor]]
"""Token ids and the row that an engine returned for them, in the order of the requests."""

_SHORT_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55)
_OFFSETS = (-1, 0, 1, 2, 9)
_STEM_LENGTH, _FORKS = 40, 8
_CUTS = 4

_ROWS_AT_ONCE = 32
"""Rows compared at once, so that their float64 copies fit into memory for any vocabulary."""


# -- sequences and requests -----------------------------------------------------------


def contexts_of(
    base: Sequence[int],
    sequences: Iterable[Sequence[int]],
    limits: Mapping[str, int],
    longest: int,
) -> dict[TokenTuple, str]:
    """List the contexts on which engines are compared.

    Args:
        base: At least one token id. Contexts of every length repeat these ids.
        sequences: Further token ids, which are requested whole and in part.
        limits: Lengths at which the computation of a model changes, by name. Contexts are
            slightly shorter, equally long and longer.
        longest: Maximum number of tokens of a context.

    Returns:
        Distinct contexts with their kinds.

    Raises:
        ValueError: `base` is empty.
    """
    if not base:
        raise ValueError("the texts have no tokens; pass some text")
    repeated = (list(base) * (longest // len(base) + 1))[:longest]
    contexts: dict[TokenTuple, str] = {}
    for kind, ids in _contexts(repeated, sequences, limits):
        if 0 < len(ids) <= longest:
            contexts.setdefault(tuple(ids), kind)
    return contexts


def _contexts(
    base: Sequence[int], sequences: Iterable[Sequence[int]], limits: Mapping[str, int]
) -> Iterator[tuple[str, Sequence[int]]]:
    for length in _SHORT_LENGTHS:
        yield "short", base[:length]
    stem = base[:_STEM_LENGTH]
    for fork in range(_FORKS):
        start = (7 * fork) % max(len(base) - 4, 1)
        yield "fork", [*stem, *base[start : start + 1 + fork % 4]]
    for name, limit in limits.items():
        for length in (limit + offset for offset in _OFFSETS):
            yield f"around the {name}", base[:length] if length <= len(base) else []
    for kind, sequence in [*(("text", ids) for ids in sequences), ("long", base)]:
        for part in range(1, _CUTS + 1):
            yield kind, sequence[: len(sequence) * part // _CUTS]


async def request_rows(
    llm: AsyncLM, sequences: Sequence[TokenTuple], *, cached: bool = False
) -> list[tuple[TokenTuple, torch.Tensor]]:
    """Request the rows of all sequences concurrently.

    Args:
        llm: The model.
        sequences: Token ids.
        cached: Whether rows may come from the output cache.
    """
    request = functools.partial(llm.next_token_logprobs, use_cache=cached)
    rows = await asyncio.gather(*map(request, sequences))
    return list(zip(sequences, rows, strict=True))


# -- differences ----------------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """Differences between an engine's rows and the expected ones.

    Attributes:
        largest: Largest absolute difference of a log-probability, in nats. Infinite if a token
            is impossible in one of the rows only, or if a row has NaN.
        where: Kind and length of the context with the largest difference.
        total_variation: Largest total variation distance of two distributions, at most 1.
        mean_total_variation: Its mean over all rows.
        same_greedy: Fraction of rows with the expected most likely token.
        same_draw: Fraction of rows from which one random number draws the expected token.
        repeats: Largest difference between two rows that the engine returned for one context.
        rows: Number of rows compared.
    """

    largest: float
    where: str
    total_variation: float
    mean_total_variation: float
    same_greedy: float
    same_draw: float
    repeats: float
    rows: int


def differences(
    answers: RowsByRequest,
    expected: Callable[[TokenTuple], torch.Tensor],
    *,
    kinds: Mapping[TokenTuple, str] | None = None,
    seed: int = 0,
) -> Differences:
    """Compare an engine's rows with the expected ones.

    Args:
        answers: At least one row of the engine with its token ids. A context may occur
            several times.
        expected: Returns the expected row of a context.
        kinds: Names of contexts for `where`, by token ids.
        seed: Seed of the random numbers for draws.

    Raises:
        ValueError: The lengths of a row and its expected row differ.
    """
    errors: list[float] = []
    variations: list[float] = []
    greedy: list[bool] = []
    draws: list[bool] = []
    repeats: list[float] = []
    first_rows: dict[TokenTuple, torch.Tensor] = {}
    for start in range(0, len(answers), _ROWS_AT_ONCE):
        part = answers[start : start + _ROWS_AT_ONCE]
        for ids, row in part:
            if row.shape != expected(ids).shape:
                raise ValueError(f"a row of {len(row)} ids; expected {len(expected(ids))}")
        rows = torch.stack([row.detach().cpu() for _, row in part]).double()
        expected_rows = torch.stack([expected(ids).cpu() for ids, _ in part]).double()
        earlier = [first_rows.setdefault(ids, row.detach().cpu()) for ids, row in part]
        errors += _entry_differences(rows, expected_rows).amax(1).tolist()
        repeats += _entry_differences(rows, torch.stack(earlier)).amax(1).tolist()
        variations += ((rows.exp() - expected_rows.exp()).abs().sum(1) / 2).tolist()
        greedy += (rows.float().argmax(1) == expected_rows.float().argmax(1)).tolist()
        uniforms = [stream_uniform(seed, start + number) for number in range(len(part))]
        pairs = torch.cat([rows, expected_rows]).float()
        drawn, drawn_expected = draw_tokens(pairs, [1.0] * len(pairs), uniforms * 2).chunk(2)
        draws += (drawn == drawn_expected).tolist()
    worst = max(range(len(errors)), key=errors.__getitem__)
    ids = answers[worst][0]
    kind = (kinds or {}).get(ids)
    return Differences(
        largest=errors[worst],
        where=", ".join(filter(None, [kind, f"{len(ids)} tokens"])),
        total_variation=max(variations),
        mean_total_variation=sum(variations) / len(variations),
        same_greedy=sum(greedy) / len(greedy),
        same_draw=sum(draws) / len(draws),
        repeats=max(repeats),
        rows=len(errors),
    )


def largest_difference(row: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference of a log-probability.

    Args:
        row: Log-probabilities, of any shape, on any device.
        expected: The expected ones.

    Returns:
        0 for equal rows. Infinite if an entry is `-inf` in one of them only, if one has NaN,
        or if the shapes differ.
    """
    if row.shape != expected.shape:
        return math.inf
    errors = _entry_differences(row, expected)
    return float(errors.max()) if errors.numel() else 0.0


def _entry_differences(row: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Absolute difference of each entry of two tensors of one shape; float64, on the CPU."""
    row, expected = row.detach().cpu().double(), expected.cpu().double()
    same = row == expected  # the difference of equal infinities is NaN
    return torch.where(same, 0.0, (row - expected).abs()).nan_to_num(
        nan=math.inf, posinf=math.inf
    )


def describe_difference(row: Any, expected: torch.Tensor, index: str = "id") -> str:
    """Describe where a row, or another list, differs most from the expected one."""
    if isinstance(row, BaseException):
        return describe_error(row)
    if not isinstance(row, torch.Tensor):
        return f"a {type(row).__name__}"
    if row.shape != expected.shape:
        return f"shape {tuple(row.shape)}; by the oracle it is {tuple(expected.shape)}"
    errors = _entry_differences(row, expected)
    worst = int(errors.argmax())
    return (
        f"{float(row[worst]):.6g} instead of {float(expected[worst]):.6g} at {index} {worst}, "
        f"{int((errors > 1e-4).sum())} of {len(row)} {index}s off by more than 1e-4"
    )
