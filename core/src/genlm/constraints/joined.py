"""`JoinedConstraint`: the members of a population under several constraints."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from genlm.constraints.protocol import (
    Constraint,
    Flags,
    Floats,
    Integers64,
    IntegersLike,
    attribute_values,
    checked_result,
    mask_of_each_member,
)
from genlm.constraints.states import member_index
from genlm.core.base.arrays import ranges
from genlm.core.base.blocking import is_blocking
from genlm.core.model.members import checked_array
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.row_biases import row_biases
from genlm.core.rows.row_masks import RowMasks
from genlm.core.rows.sampling import SeedLike, SeedStreams, checked_seeds, member_seeds

if TYPE_CHECKING:
    from genlm.core.model.members import ArrayLike
    from genlm.core.model.population import Population
    from genlm.core.rows.row_masks import MasksLike


class JoinedConstraint(Constraint):
    """Members of which each has one of several constraints.

    Args:
        parts: The constraints.
        members: The members of each constraint, in its order; together, each member once.
            Constraints without members are dropped if another one has members.
        vocab_size: Number of token ids.
    """

    def __init__(
        self, parts: Sequence[Constraint], members: Sequence[Integers64], vocab_size: int
    ) -> None:
        pairs = [*zip(parts, members, strict=True)]
        self._pairs = [pair for pair in pairs if len(pair[1])] or pairs[:1]
        self._vocab_size = vocab_size
        # Place of each member among the members of all constraints, one after the other.
        self._order = np.argsort(np.concatenate(members))

    @classmethod
    def of(cls, constraints: Sequence[Constraint], vocab_size: int) -> JoinedConstraint:
        """Return the members of at least one constraint, one constraint after the other."""
        parts: list[Constraint] = []
        members: list[Integers64] = []
        begin = 0
        for constraint in constraints:
            pairs = [(constraint, np.arange(len(constraint)))]
            if isinstance(constraint, cls):
                pairs = constraint._pairs  # noqa: SLF001 - of the same class
            for part, places in pairs:
                parts.append(part)
                members.append(places + begin)
            begin += len(constraint)
        return cls(parts, members, vocab_size)

    @property
    def finished(self) -> Flags:  # type: ignore[override]
        """Whether the text of each member has ended."""
        finished: Flags = self._attribute("finished")
        return finished

    @property
    def log_potential(self) -> Floats:  # type: ignore[override]
        """Log of a factor of each member's probability."""
        log_potential: Floats = self._attribute("log_potential")
        return log_potential

    def _attribute(self, name: str) -> Any:
        values = [attribute_values(part, name) for part, _ in self._pairs]
        return np.concatenate(values)[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the mask of each member; waits until they are computed."""
        return self._draw_masks()

    def _draw_masks(self) -> tuple[MasksLike, Integers64 | None]:
        batches = [mask_of_each_member(part, self._vocab_size) for part, _ in self._pairs]

        def joined() -> RowMasks:
            return RowMasks.joined(batches).of(self._order)

        if any(masks.is_deferred for masks in batches):
            return RowMasks.deferred(joined, len(self)), None
        return joined(), None

    def advance(self, token_ids: IntegersLike) -> JoinedConstraint:
        """Return the constraint after each member was extended by a token."""
        ids = checked_array(token_ids)
        parts = [
            checked_result(part.advance(ids[members]), part, "advance")
            for part, members in self._pairs
        ]
        members = [members for _, members in self._pairs]
        return JoinedConstraint(parts, members, self._vocab_size)

    def __getitem__(self, ancestors: Any) -> JoinedConstraint:
        sizes = np.array([len(part) for part, _ in self._pairs])
        index = self._order[member_index(ancestors)]
        selected_parts = np.repeat(np.arange(len(sizes)), sizes)[index]
        places = ranges(0, sizes)[index]
        counts = np.bincount(selected_parts, minlength=len(sizes))
        by_part = np.argsort(selected_parts, kind="stable")
        all_members = np.split(by_part, counts.cumsum()[:-1])
        parts = [
            checked_result(part[places[selected]], part, "indexing", len(selected))
            for (part, _), selected in zip(self._pairs, all_members, strict=True)
        ]
        return JoinedConstraint(parts, all_members, self._vocab_size)

    @property
    def _has_own_proposal(self) -> bool:
        return any(
            part._has_own_proposal  # noqa: SLF001 - of the same package
            for part, _ in self._pairs
        )

    async def draw(
        self,
        population: Population,
        *,
        temperature: float = 1.0,
        bias: ArrayLike = 0.0,
        seed: SeedLike = None,
    ) -> DrawnTokens:
        """Draw tokens for all members in one request, if all constraints draw from masks."""
        if not self._has_own_proposal:
            return await super().draw(population, temperature=temperature, bias=bias, seed=seed)
        self._check_size(population)
        streams = checked_seeds(seed, len(self))
        if isinstance(streams, int):
            streams = SeedStreams(member_seeds(streams, np.arange(len(self))))
        biases = row_biases(bias, len(self), self._vocab_size)

        async def draw_part(part: Constraint, members: Integers64) -> DrawnTokens:
            drawn = await part.draw(
                population[members],
                temperature=temperature,
                bias=0.0 if biases is None else biases.of(members).in_order,
                seed=streams[members],
            )
            if len(drawn.token_ids) != len(members):
                raise ValueError(
                    f"{type(part).__name__}.draw returned {len(drawn.token_ids)} draws for "
                    f"{len(members)} members"
                )
            return drawn

        if is_blocking():
            draws = [await draw_part(part, members) for part, members in self._pairs]
        else:
            draws = await _gathered(draw_part(part, members) for part, members in self._pairs)
        order = torch.from_numpy(self._order)
        return DrawnTokens(*(torch.cat(columns)[order] for columns in zip(*draws, strict=True)))

    def _prepare_advance(self, token_ids: Integers64) -> None:
        for part, members in self._pairs:
            part._prepare_advance(token_ids[members])  # noqa: SLF001 - of the same package


async def _gathered(draws: Iterable[Coroutine[Any, Any, DrawnTokens]]) -> list[DrawnTokens]:
    """Await concurrent draws; if one fails or the caller is cancelled, cancel all."""
    tasks = [asyncio.ensure_future(draw) for draw in draws]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
