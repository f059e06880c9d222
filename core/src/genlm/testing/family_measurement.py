"""`measure_family`: compares an engine's rows of a tiny model with the oracle.

The requests are those of a particle program. The caller provides the time limit and, if the
engine needs one, a separate process.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from genlm import AsyncLM, Capability, ModelLoadError
from genlm.plugin import describe_error
from genlm.testing.comparison import RowsByRequest, contexts_of, differences, request_rows
from genlm.testing.target import TokenTuple
from genlm.testing.tiny_model import TINY_VOCABULARY

if TYPE_CHECKING:
    import torch

    from genlm.testing.tiny_model import TinyModel

_LONGEST = 60
_FIRST_ID = 3  # the special tokens come before
_LIMITS = {f"window of {size}": size for size in (4, 16)} | {"block of 32": 32}
_LENGTHS = (60, 47, 33, 23, 23, 13, 9)
_GROWING_FROM = (1, 11, 11, 27)
_STEPS = 12


@dataclass(frozen=True)
class FamilyResult:
    """The result of one model on one engine.

    Attributes:
        status: `"right"`: every row is within the bound. `"wrong"`: a row is not.
            `"refused"`: loading raised `ModelLoadError`. `"fails"`: loading raised another
            exception, or a request raised.
        error: Largest difference of a log-probability from the oracle's; infinite if a row
            has NaN, None if there are no rows.
        reason: Why the model was refused or failed, or the position of the largest error.
        rows: Number of rows that were compared.
        statistics: The engine's statistics at the end.
    """

    status: Literal["right", "wrong", "refused", "fails"]
    error: float | None = None
    reason: str = ""
    rows: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)


def measure_family(
    load: Callable[[Path], AsyncLM],
    model: TinyModel,
    *,
    bound: float = 1e-4,
    seed: int = 0,
) -> FamilyResult:
    """Compare an engine's rows of a model with an unbatched forward pass.

    Sequences have up to 60 tokens, more than every attention window of `families`. They are
    requested in batches of mixed lengths, with forks, duplicates and cancellations, and as
    particles that grow by one token per step and are resampled; then again from the output
    cache, with the engine's cached prefixes and, if it can clear them, without.

    Args:
        load: Loads the folder with the engine.
        model: The model and its oracle.
        bound: The largest difference in log-probability that counts as right.
        seed: Seed of the token ids.

    Returns:
        The result; exceptions of the engine are reported in it and not raised.
    """
    try:
        llm = load(model.path)
    except ModelLoadError as error:
        return FamilyResult("refused", reason=str(error))
    except Exception as error:  # noqa: BLE001 - reported
        return FamilyResult("fails", reason=f"at load: {_with_cause(error)}")
    program = _Program(llm, random.Random(seed))
    try:
        with llm:
            asyncio.run(program.run())
            statistics = dict(llm.statistics().engine)
    except Exception as error:  # noqa: BLE001 - reported
        return FamilyResult("fails", reason=_with_cause(error), rows=len(program.answers))
    return _compare(program.answers, model, bound, statistics)


class _Program:
    """The requests of one measurement and their rows."""

    def __init__(self, llm: AsyncLM, rng: random.Random) -> None:
        self._llm = llm
        self._rng = rng
        self._longest = min(_LONGEST, llm.max_context or _LONGEST)
        self.answers: list[tuple[TokenTuple, torch.Tensor]] = []

    async def run(self) -> None:
        """Send all requests; append the rows to `answers`."""
        texts = [self._random_ids(min(length, self._longest)) for length in _LENGTHS]
        contexts = [*contexts_of(self._random_ids(_LONGEST), texts, _LIMITS, self._longest)]
        contexts += contexts[:4]  # duplicates
        await self._request(contexts, cancel_some=True)
        await self._grow()
        await self._request(self._shuffled(contexts), cached=False)
        await self._request(contexts)  # from the output cache
        if Capability.PREFIX_CACHE in self._llm.capabilities:
            self._llm.clear_kv_cache()
        self._llm.clear_output_cache()
        await self._request(self._shuffled(contexts))
        for ids in contexts[:3]:
            await self._request([ids], cached=False)

    async def _grow(self) -> None:
        """Grow particles token by token across the windows and resample one of them."""
        particles = [self._random_ids(n) for n in _GROWING_FROM]
        for step in range(_STEPS):
            if step % 4 == 3:
                particles[1] = self._rng.choice(particles)
            extended = [(*ids, *self._random_ids(1)) for ids in particles]
            particles = [ids[: self._longest] for ids in extended]
            await self._request(particles, cancel_some=step % 3 == 1)

    async def _request(
        self, sequences: Sequence[TokenTuple], *, cached: bool = True, cancel_some: bool = False
    ) -> None:
        """Request rows concurrently; with `cancel_some`, cancel some further requests."""
        extra = (
            [self._random_ids(min(20, self._longest)), *sequences[:1]] if cancel_some else []
        )
        cancelled = [asyncio.ensure_future(self._llm.next_token_logprobs(ids)) for ids in extra]
        answers = asyncio.ensure_future(request_rows(self._llm, sequences, cached=cached))
        for _ in range(2):  # so that all requests are scheduled
            await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        self.answers += await answers
        await asyncio.gather(*cancelled, return_exceptions=True)

    def _random_ids(self, count: int) -> TokenTuple:
        return tuple(self._rng.randrange(_FIRST_ID, TINY_VOCABULARY) for _ in range(count))

    def _shuffled(self, sequences: Iterable[TokenTuple]) -> list[TokenTuple]:
        return sorted(sequences, key=lambda _: self._rng.random())


def _compare(
    answers: RowsByRequest,
    model: TinyModel,
    bound: float,
    statistics: dict[str, Any],
) -> FamilyResult:
    # Every prefix of a sequence follows it, so its row comes from the same pass.
    requested = sorted({ids for ids, _ in answers}, reverse=True)
    expected = {ids: model.logprobs(ids) for ids in requested}
    try:
        result = differences(answers, expected.__getitem__)
    except ValueError as error:
        return FamilyResult("wrong", math.inf, str(error), len(answers), statistics)
    if result.largest <= bound:
        return FamilyResult("right", result.largest, "", result.rows, statistics)
    where = f"largest after {result.where}"
    return FamilyResult("wrong", result.largest, where, result.rows, statistics)


def _with_cause(error: BaseException) -> str:
    cause = f" ({describe_error(error.__cause__)})" if error.__cause__ else ""
    return f"{describe_error(error)}{cause}"
