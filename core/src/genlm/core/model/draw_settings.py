"""`DrawSettings`: the checked arguments of a draw from the members of a population."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genlm.core.model.members import ArrayLike, Flags, Members, checked_array
from genlm.core.queries.generations import NO_TOKEN, Integers64
from genlm.core.rows.draws import DrawnTokens
from genlm.core.rows.row_masks import MasksLike, RowMasks
from genlm.core.rows.row_weights import RowWeights, check_log_masses
from genlm.core.rows.truncation import Truncation


class DrawSettings(NamedTuple):
    """Checked arguments of a draw from the members of a population.

    A member is active if it is neither finished nor dead and its mask has a token. Tokens are
    drawn for active members only.

    Attributes:
        active: Indices of the active members, ascending.
        log_mass: Log-mass of the inactive members, shape `(n,)`, float32: 0 if finished, else
            `-inf`.
        weights: Masks, temperature, bias and limits of all members.
    """

    active: Integers64
    log_mass: npt.NDArray[np.float32]
    weights: RowWeights

    @classmethod
    def of(
        cls,
        population: Members,
        masks: MasksLike | None,
        mask_index: ArrayLike | None,
        limits: tuple[int | None, float | None, float | None] = (None, None, None),
        *,
        finished: Flags | None = None,
        dead: Flags | None = None,
        **options: Any,
    ) -> DrawSettings:
        """Check the arguments of a draw.

        Args:
            population: The population.
            masks: As `Population.draw`.
            mask_index: As `Population.draw`.
            limits: `top_k`, `top_p` and `min_p`, as `Population.draw`.
            finished: Flags of further members that are finished for this draw, shape `(n,)`.
            dead: Flags of members without an allowed token; None for those with empty masks.
            **options: Temperature and bias, as `RowWeights`.
        """
        count, vocab_size = len(population), population._lm.vocabulary.size  # noqa: SLF001
        is_active = ~population._finished  # noqa: SLF001 - of the same package
        if finished is not None:
            is_active &= ~finished
        index = None if mask_index is None else checked_array(mask_index, "mask_index")
        if masks is None and index is not None:
            raise ValueError("mask_index without masks; it selects the mask of each member")
        rows: RowMasks | None
        if masks is None or isinstance(masks, RowMasks):  # of a constraint
            rows = masks
        else:
            rows = RowMasks(masks, count, vocab_size, index)
        if rows is not None and not rows.is_deferred:
            dead = rows.is_empty if dead is None else dead | rows.is_empty
        log_mass = np.zeros(count, np.float32)
        if dead is not None:
            log_mass[is_active & dead] = -math.inf
            is_active &= ~dead
        [active] = is_active.nonzero()
        truncation = Truncation.checked(vocab_size, *limits)
        weights = RowWeights((count, vocab_size), rows, truncation=truncation, **options)
        return cls(active, log_mass, weights)

    def weights_unless_equal(self, vocab_size: int) -> RowWeights | None:
        """Return the weights of all members; None if they are the model's probabilities."""
        weights = self.weights
        is_equal = weights.masks is None and weights.are_masked_probabilities(vocab_size)
        return None if is_equal else weights

    @property
    def active_weights(self) -> RowWeights:
        """The weights of the active members."""
        return self.weights.of(self.active)

    def masses_of_all(self, masses: torch.Tensor) -> torch.Tensor:
        """Return the log-masses of all members from those of the active ones, after a check."""
        check_log_masses(masses, self.active, len(self.log_mass))
        if len(self.active) == len(self.log_mass):
            return masses
        log_mass = torch.from_numpy(self.log_mass.copy())
        log_mass[self.active] = masses
        return log_mass

    def draws_of_all(self, columns: tuple[torch.Tensor, ...]) -> DrawnTokens:
        """Return the draws of all members from the columns of the active members."""
        is_all, is_single = len(self.active) == len(self.log_mass), columns[0].ndim == 1
        if is_all and is_single and not self.weights.has_masks_or_biases:
            return DrawnTokens(*columns)  # every member has a token, and the log-mass 0
        log_mass = self.masses_of_all(columns[2])
        drawn = DrawnTokens(*columns)
        if len(self.active) < len(self.log_mass):
            shape = (len(self.log_mass), *columns[0].shape[1:])
            logprobs = torch.from_numpy(self.log_mass).view(-1, *[1] * (len(shape) - 1))
            logprobs = logprobs.expand(shape).clone()
            if logprobs.ndim > 1:  # without replacement: a finished member is one continuation
                logprobs[:, 1:] = -math.inf
            drawn = DrawnTokens(
                torch.full(shape, NO_TOKEN, device="cpu"),
                logprobs,
                log_mass,
                torch.zeros_like(logprobs),
            )
            members = torch.from_numpy(self.active)
            for column, values in zip(drawn, columns, strict=True):
                column[members] = values
        return drawn
