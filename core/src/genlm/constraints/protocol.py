"""`Constraint`: the allowed continuations of the members of a population."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from genlm.core.base.arrays import host_array
from genlm.core.base.blocking import run_blocking
from genlm.core.model.draw_settings import DrawSettings
from genlm.core.model.lm import AsyncLM, checked_model
from genlm.core.model.members import Members, checked_array
from genlm.core.rows.row_masks import RowMasks

if TYPE_CHECKING:
    import torch

    from genlm.core.model.members import ArrayLike
    from genlm.core.model.population import Population
    from genlm.core.rows.draws import DrawnTokens
    from genlm.core.rows.row_masks import MasksLike
    from genlm.core.rows.sampling import SeedLike

Flags: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Integers64: TypeAlias = npt.NDArray[np.int64]
IntegersLike: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor"


class Constraint(ABC):
    """The allowed continuations of the N members of a population. Immutable.

    Subclasses implement `masks`, `advance` and indexing, and set the attributes. Those that
    use another proposal override `draw`.

    Attributes:
        finished: Whether the text of each member has ended, shape `(n,)`, bool.
        log_potential: Log of a factor of each member's probability, shape `(n,)`, float64: 0
            for members that satisfy the constraint, `-inf` for dead ones, which violated it.
            Soft constraints have other values.

    The attributes of a user-defined constraint may also be torch tensors.
    """

    finished: Flags | torch.Tensor
    log_potential: Floats | torch.Tensor

    @abstractmethod
    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the allowed next tokens of each member.

        Returns:
            The arguments `masks` and `mask_index` of `Population.draw`. The mask is empty for
            dead members and for members without continuation, and arbitrary for finished
            members.
        """

    @abstractmethod
    def advance(self, token_ids: IntegersLike) -> Self:
        """Return the constraint after each member was extended by a token.

        Args:
            token_ids: Token ids, shape `(n,)`; -1 for no token. Finished and dead members do
                not change.

        Raises:
            ValueError: The shape is not `(n,)`.
        """

    @abstractmethod
    def __getitem__(self, ancestors: Any) -> Self:
        """Return the constraint of selected members, possibly with repetitions."""

    @staticmethod
    def cat(llm: AsyncLM, constraints: Iterable[Constraint]) -> Constraint:
        """Return the constraint of the members of several constraints, in order.

        Each member keeps its own language, so one population may follow several, and finished
        members can be replaced as by `Population.cat`.

        Args:
            llm: Model of the populations that follow the constraints.
            constraints: At least one.

        Raises:
            ValueError: `constraints` is empty.
            TypeError: One of them is not a constraint.
        """
        from genlm.constraints.joined import JoinedConstraint  # a subclass

        constraints = list(constraints)
        if not constraints:
            raise ValueError("no constraints; pass at least one")
        for constraint in constraints:
            if not isinstance(constraint, Constraint):
                raise TypeError(f"expected constraints; found {constraint!r:.80}")
        return JoinedConstraint.of(constraints, checked_model(llm).vocab_size)

    __iter__ = None
    """Iteration raises a `TypeError`: members are selected by slices or arrays."""

    def __len__(self) -> int:
        return len(self.finished)

    async def draw(
        self,
        population: Population,
        *,
        temperature: float = 1.0,
        bias: ArrayLike = 0.0,
        seed: SeedLike = None,
    ) -> DrawnTokens:
        """Draw the next token of each member from the allowed tokens.

        Args:
            population: Population of the same size. Its finished members get token -1.
            temperature: As `Population.draw`.
            bias: As `Population.draw`.
            seed: As `Population.draw`.

        Returns:
            As `Population.draw`. `log_mass` is the log of an unbiased estimate if the mass is
            not known; `logprobs - draw_logprob` is the log-weight of each draw.

        Raises:
            ValueError: The population has another size, or its model has another number of
                token ids.
            TypeError: `population` is not a population.
            GenlmError: As `Population.draw`.
        """
        settings = self._draw_settings(population, temperature=temperature, bias=bias)
        result: DrawnTokens = await population._draw(  # noqa: SLF001 - internal to genlm
            settings, seed, then=self._prepared
        )
        return result

    def draw_sync(self, population: Population, **options: Any) -> DrawnTokens:
        """Draw as `draw` does, with the same options, on the calling thread."""
        return run_blocking(self.draw(population, **options))

    @property
    def _has_own_proposal(self) -> bool:
        """Whether `draw` may use another proposal than the masks, such as one with a bias."""
        return type(self).draw is not Constraint.draw

    def _draw_settings(self, population: Population, **options: Any) -> DrawSettings:
        """Return the settings of a draw from the masks, with a temperature and a bias."""
        self._check_size(population)
        masks, index = self._draw_masks()
        finished, dead = self._finished_and_dead
        return DrawSettings.of(
            population, masks, index, finished=finished, dead=dead, **options
        )

    def _check_size(self, population: Population) -> None:
        """Raise an error for other objects than populations of the same size."""
        if not isinstance(population, Members):
            raise TypeError(f"population={population!r:.80}; expected a Population")
        if len(population) != len(self):
            raise ValueError(
                f"a constraint of {len(self)} members for a population of {len(population)}; "
                f"index both with the same ancestors"
            )

    @property
    def _finished_and_dead(self) -> tuple[Flags, Flags]:
        """Flags of the finished and of the dead members; no member has both."""
        dead = np.isneginf(attribute_values(self, "log_potential"))
        return attribute_values(self, "finished") & ~dead, dead

    def _draw_masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return masks for a draw, which may be computed later or shared by several steps."""
        masks: object = self.masks()
        if not isinstance(masks, tuple) or len(masks) != 2:
            raise TypeError(
                f"{type(self).__name__}.masks returned {type(masks).__name__}; expected a "
                f"pair, the arguments masks and mask_index of Population.draw"
            )
        return masks

    def _prepared(self, drawn: DrawnTokens) -> DrawnTokens:
        self._prepare_advance(drawn.token_ids.numpy())
        return drawn

    def _prepare_advance(self, token_ids: Integers64) -> None:
        """Prepare `advance` for drawn tokens; not called on an event loop."""
        del token_ids

    def __repr__(self) -> str:
        finished = int(attribute_values(self, "finished").sum())
        dead = int(np.isneginf(attribute_values(self, "log_potential")).sum())
        return f"<{type(self).__name__}: {len(self)} members, {finished} finished, {dead} dead>"


def mask_of_each_member(constraint: Constraint, vocab_size: int) -> RowMasks:
    """Return the masks of a draw, which may be computed later."""
    masks, index = constraint._draw_masks()  # noqa: SLF001 - internal to genlm.constraints
    if isinstance(masks, RowMasks):
        return masks
    index = None if index is None else checked_array(index, "mask_index")
    return RowMasks(masks, len(constraint), vocab_size, index)


def attribute_values(constraint: Constraint, name: str) -> npt.NDArray[Any]:
    """Return `finished` or `log_potential`, which may be a list or a tensor, as an array.

    One number is the `log_potential` of all members.

    Raises:
        ValueError: The attribute does not have a value for each member, or the values of
            `finished` are not booleans.
    """
    full_name, shape = f"{type(constraint).__name__}.{name}", (len(constraint),)
    values = host_array(getattr(constraint, name), full_name)
    is_flags = name == "finished"
    if not is_flags and not values.shape:
        values = np.full(shape, values)
    if values.shape != shape or (is_flags and values.size and values.dtype != bool):
        raise ValueError(
            f"{full_name} has shape {values.shape} and type {values.dtype}; expected {shape} "
            f"{'booleans' if is_flags else 'numbers'}"
        )
    return values


def checked_result(
    result: object, constraint: Constraint, method: str, size: int | None = None
) -> Constraint:
    """Return the result of a method of a constraint, by default a constraint of its size."""
    name = f"the result of {type(constraint).__name__}, {method},"
    if not isinstance(result, Constraint):
        raise TypeError(f"{name} is {type(result).__name__}; expected a Constraint")
    expected = len(constraint) if size is None else size
    if len(result) != expected:
        raise ValueError(f"{name} has {len(result)} members; expected {expected}")
    return result
