"""The contexts that engines are compared on: the same token ids for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from genlm.engines.model_facts import ModelFacts

__all__ = ["Context", "contexts_of", "limits_of", "longest_of"]

DEFAULT_LONGEST = 256
MOST_BY_DEFAULT = 8192

_SHORT = (1, 2, 3, 5, 8, 13, 21, 34, 55)
_AROUND = (-1, 0, 1, 2, 9)
_STEM, _FORKS = 40, 8
_CUTS = 4


class Context(NamedTuple):
    """Token ids to ask for, and what they are an example of."""

    kind: str
    ids: list[int]


def limits_of(facts: ModelFacts | None) -> dict[str, int]:
    """Return the lengths at which a model's computation changes, by name."""
    if facts is None:
        return {}
    limits = {f"window of {size}": size for size in facts.sliding_windows}
    if facts.attention_chunk_size is not None:
        limits[f"chunk of {facts.attention_chunk_size}"] = facts.attention_chunk_size
    if facts.rope_types and facts.original_positions is not None:
        limits[f"original context of {facts.original_positions}"] = facts.original_positions
    elif facts.rope_by_longest and facts.max_positions is not None:
        limits[f"original context of {facts.max_positions}"] = facts.max_positions
    return limits


def longest_of(wanted: int | None, limits: Iterable[int], max_context: int | None) -> int:
    """Choose the longest context: beyond every limit, within what the engine takes."""
    needed = max([DEFAULT_LONGEST, *(limit + 16 for limit in limits)])
    longest = min(needed, MOST_BY_DEFAULT) if wanted is None else wanted
    return longest if max_context is None else min(longest, max_context)


def contexts_of(
    base: Sequence[int],
    sequences: Sequence[Sequence[int]],
    limits: dict[str, int],
    longest: int,
) -> list[Context]:
    """Make contexts: short ones, forks, each sequence, all around every limit.

    Args:
        base: At least one token id; contexts of every length repeat it as often as they need.
        sequences: Contexts to ask for, whole and in part.
        limits: From `limits_of`.
        longest: The most tokens of a context.

    Returns:
        Contexts without duplicates, none longer than `longest`.

    Raises:
        ValueError: `base` is empty.
    """
    if not base:
        raise ValueError("the texts have no tokens; pass some text")
    repeated = (list(base) * (longest // len(base) + 1))[:longest]
    found: dict[tuple[int, ...], str] = {}
    for kind, ids in _all(repeated, sequences, limits):
        if 0 < len(ids) <= longest:
            found.setdefault(tuple(ids), kind)
    return [Context(kind, list(ids)) for ids, kind in found.items()]


def _all(
    base: Sequence[int], sequences: Sequence[Sequence[int]], limits: dict[str, int]
) -> Iterator[tuple[str, Sequence[int]]]:
    for length in _SHORT:
        yield "short", base[:length]
    stem = base[:_STEM]
    for fork in range(_FORKS):
        start = (7 * fork) % max(len(base) - 4, 1)
        yield "fork", [*stem, *base[start : start + 1 + fork % 4]]
    for name, limit in limits.items():
        for more in _AROUND:
            yield (
                f"around the {name}",
                base[: limit + more] if limit + more <= len(base) else [],
            )
    for ids in sequences:
        for part in range(1, _CUTS + 1):
            yield "text", ids[: len(ids) * part // _CUTS]
    for part in range(1, _CUTS + 1):
        yield "long", base[: len(base) * part // _CUTS]
