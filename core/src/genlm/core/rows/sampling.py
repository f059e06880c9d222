"""Random numbers of draws, and drawing tokens from rows reproducibly on every engine.

The token at a position of a continuation depends on the row, the temperature, the seed of the
continuation and the position, and on nothing else: no generator keeps a state. Chunked
prefills, preemption and other requests change nothing, every rank of a model that is split
over several devices draws the same token, and so does every engine with equal rows.

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) computes
all numbers; it computes any position of a stream directly. `stream_seeds` derives the seeds of
streams from one seed by the same function, and `uniforms` computes numbers of many streams at
once. The computation is in 64-bit integers on the host, so the numbers are the same on every
machine and device.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.base.arrays import host_array
from genlm.core.base.validation import checked_integer, is_sequence_like
from genlm.core.rows.draws import batch_draw
from genlm.core.rows.row_weights import RowWeights

_Words: TypeAlias = npt.NDArray[np.uint64]

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def checked_seed(seed: Any) -> int:
    """Return a valid seed, an integer of at least 0; a random seed for None."""
    return secrets.randbits(63) if seed is None else checked_integer("seed", seed, 0)


class SeedStreams:
    """The random streams of the members of a population, in the place of seeds.

    Args:
        seeds: Seed of the stream of each member, as of `stream_seeds`, shape `(n,)`.
    """

    def __init__(self, seeds: npt.NDArray[np.integer]) -> None:
        self.seeds = seeds.astype(np.uint64)

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, members: Any) -> SeedStreams:
        return SeedStreams(self.seeds[members])


SeedLike: TypeAlias = "int | npt.ArrayLike | torch.Tensor | SeedStreams | None"
"""A seed of all members, or one for each: arguments of the draws of populations."""


def checked_seeds(seed: SeedLike, count: int) -> int | SeedStreams:
    """Return a seed as `checked_seed` does, or the streams of `count` members with a seed each.

    Raises:
        ValueError: A seed is negative, or there is not one for each member.
        TypeError: A seed is not an integer.
    """
    if not is_sequence_like(seed):
        return checked_seed(seed)
    seeds = seed.seeds if isinstance(seed, SeedStreams) else host_array(seed, "seed")
    if seeds.dtype.kind not in "iu" and seeds.size:
        raise TypeError(f"seed has values of type {seeds.dtype}; expected integers")
    if seeds.shape != (count,):
        raise ValueError(
            f"seeds of shape {seeds.shape} for {count} members; pass one seed, or one for each"
        )
    if isinstance(seed, SeedStreams):
        return seed
    if count and np.minimum.reduce(seeds) < 0:
        raise ValueError(f"a seed is {seeds.min()}; it must be 0 or more")
    # The streams of `stream_seeds(seed, 1)`, of each seed.
    return SeedStreams(_outputs(_outputs(_words(seeds), 0), 0) >> np.uint64(1))


def member_seeds(seed: int | SeedStreams, members: npt.NDArray[np.integer]) -> _Words:
    """Return the seeds of the streams of members, shape `(n,)`.

    Args:
        seed: As `uniforms`.
        members: Indices of the members, shape `(n,)`.
    """
    if isinstance(seed, SeedStreams):
        words: _Words = seed.seeds[members]
        return words
    words = _outputs(np.uint64(_key(seed)), members)
    words >>= np.uint64(1)  # engines take signed 64 bits
    return words


def seed_word(seed: int) -> int:
    """Return a seed below 2**64 unchanged, and a number below 2**64 for a larger one."""
    return seed if seed <= _MASK else _key(seed)


def stream_seeds(seed: int | None, count: int) -> list[int]:
    """Derive one seed per sequence, distinct and independent, from one seed.

    Args:
        seed: An integer, 0 or more, of any size; None takes fresh entropy from the operating
            system.
        count: Number of seeds; the first n are the same for every count.

    Returns:
        Integers from 0 to 2**63 - 1.

    Raises:
        ValueError: `seed` is negative.
        TypeError: `seed` is not an integer.
    """
    seeds: list[int] = member_seeds(checked_seed(seed), np.arange(count)).tolist()
    return seeds


def batch_seeds(
    seed: int | Sequence[int] | None, count: int, kind: str = "contexts"
) -> Sequence[int]:
    """Return the seeds of a batch, from one seed or one for each element.

    Raises:
        ValueError: There is not one seed for each element, or as `stream_seeds`.
        TypeError: As `stream_seeds`.
    """
    if not is_sequence_like(seed):
        return stream_seeds(cast("int | None", seed), count)
    seeds = [checked_seed(value) for value in cast("Sequence[int]", seed)]
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} {kind}; pass one for each")
    return seeds


def stream_uniform(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) at a position of a seed's stream.

    Args:
        seed: An integer, taken modulo 2**64.
        position: 0 for the first token of a continuation.

    Returns:
        A multiple of 2**-53.
    """
    return float(_mix(int(seed) + (position + 1) * _GOLDEN_GAMMA & _MASK) >> 11) / 2**53


def stream_uniforms(
    seeds: Sequence[int] | npt.NDArray[Any], positions: Sequence[int] | npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return `stream_uniform` of each seed and position, or one position: shape `(n,)`."""
    return _unit_floats(_outputs(_words(seeds), positions))


def uniforms(
    seed: int | SeedStreams,
    members: npt.NDArray[np.integer],
    steps: int | npt.NDArray[np.integer],
    count: int | None = None,
) -> npt.NDArray[np.float64]:
    """Return uniform numbers in [0, 1) of members of a population, each at a step.

    The number of member i at a step is that of the stream of `stream_seeds(seed, n)[i]` at
    position `step`: it depends on the seed, the member and the step alone, not on the other
    members.

    Args:
        seed: An integer, 0 or more, of any size; or the streams of all members, in place of
            those of `stream_seeds`.
        members: Indices of the members, shape `(n,)`.
        steps: Step of each member, from 0, shape `(n,)`, or one step for all.
        count: Number of random numbers per member; the first equals the number without
            `count`. The result then has shape `(n, count)`, without `count` `(n,)`.
    """
    outputs = _outputs(member_seeds(seed, members), steps)
    if count is None:
        return _unit_floats(outputs)
    # The output of a step is its first number, and the seed of its further numbers.
    further = _outputs(outputs[:, None], np.arange(count - 1))
    return _unit_floats(np.concatenate([outputs[:, None], further], axis=1)[:, :count])


def _key(seed: int) -> int:
    """Combine the 64-bit words of a seed of any size into one."""
    if seed < 0:
        raise ValueError(f"seed={seed}; it must be 0 or more")
    key = _mix(seed + _GOLDEN_GAMMA & _MASK)
    while seed := seed >> 64:
        key = _mix((key ^ seed) + _GOLDEN_GAMMA & _MASK)
    return key


def _mix(state: int) -> int:
    """Return the output of SplitMix64 for a state below 2**64."""
    state = (state ^ (state >> 30)) * _FACTORS[0] & _MASK
    state = (state ^ (state >> 27)) * _FACTORS[1] & _MASK
    return state ^ (state >> 31)


def _outputs(seeds: Any, positions: Any) -> _Words:
    """Return the outputs of SplitMix64 at positions of streams; arrays wrap at 2**64."""
    if isinstance(positions, int):
        offsets: Any = np.uint64((positions + 1) * _GOLDEN_GAMMA & _MASK)
    else:
        offsets = (_words(positions) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA)
    words: _Words = seeds + offsets
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FACTORS[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(_FACTORS[1])
    words ^= words >> np.uint64(31)
    return words


def _unit_floats(outputs: _Words) -> npt.NDArray[np.float64]:
    """Return the highest 53 bits of outputs as numbers in [0, 1)."""
    return (outputs >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(values: Any) -> _Words:
    if not isinstance(values, np.ndarray):
        return np.array([int(value) & _MASK for value in values], np.uint64)
    return values.astype(np.uint64)


def draw_tokens(
    logprobs: torch.Tensor,
    temperatures: Sequence[float],
    uniforms: Sequence[float],
) -> torch.Tensor:
    """Draw one id per row, with probability proportional to `exp(logprobs / temperature)`.

    Inverts the cumulative distribution. Each row is drawn from independently. At
    temperature 0 the result is the most likely id, the lowest of equals.

    Args:
        logprobs: Shape `(n, vocab_size)`, float32, not necessarily normalised, `-inf` for ids
            that must not be drawn; not changed.
        temperatures: One temperature per row, finite and not negative.
        uniforms: One random number in [0, 1) per row: for reproducible draws, `stream_uniform`
            of the continuation's seed and the token's position in it.

    Returns:
        Ids, shape `(n,)`, int64, on the device of `logprobs`; -1 for a row without a possible
        id.

    Raises:
        ValueError: There is not one temperature and one random number for each row.
    """
    numbers = torch.as_tensor(uniforms, dtype=torch.float64, device="cpu")
    if numbers.shape != logprobs.shape[:1]:
        raise ValueError(
            f"uniform numbers of shape {tuple(numbers.shape)} for {len(logprobs)} rows; "
            f"expected one for each"
        )
    weights = RowWeights(logprobs.shape, temperature=temperatures)
    return batch_draw(logprobs, numbers, weights).token_ids
