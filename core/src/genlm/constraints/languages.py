"""`Language`: a set of texts, and `Intersection`, the texts of two languages.

The method `start` of a language returns a `Constraint`, which follows the members of one
population.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from genlm.constraints.text_tokens import text_tokens
from genlm.core.model.lm import AsyncLM, checked_model
from genlm.core.model.members import checked_array
from genlm.core.rows.row_masks import RowMasks

if TYPE_CHECKING:
    from genlm.core.base.validation import Integers
    from genlm.core.rows.row_masks import MasksLike


class Language(ABC):
    """A set of texts to which the members of a population are constrained."""

    @abstractmethod
    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members whose texts are empty or begin with `text`.

        Args:
            llm: Model, of which the vocabulary is used.
            size: Number of members.
            text: Beginning of the text that all members already have, such as the part of the
                prompt that belongs to the text.
            stop: Token ids that end a text; by default the tokenizer's end of text, if it
                has one. Without stop ids, a complete text without continuation is finished.

        Raises:
            ValueError: No text of the language begins with `text`.
            MissingRequirementError: A library that the language needs is not installed.
            MemoryError: A table of the language needs more memory than is free.
        """

    def __and__(self, other: Language) -> Language:
        """Return the language of the texts that are in both languages."""
        if not isinstance(other, Language):
            return NotImplemented
        return other._restricted_to(self)

    def _restricted_to(self, other: Language) -> Language:
        """Return the texts that another language also contains."""
        return Intersection(other, self)


class Intersection(Language):
    """The texts that two languages contain.

    A token is allowed if both languages allow it. If no text of both languages continues the
    text of a member, the mask of the member is empty, and its particle dies.

    Args:
        first: A language.
        second: Another language.
    """

    def __init__(self, first: Language, second: Language) -> None:
        self._languages = first, second

    def start(
        self, llm: AsyncLM, size: int, *, text: bytes = b"", stop: Integers | None = None
    ) -> Constraint:
        """Return the constraint of `size` members; see `Language.start`.

        Raises:
            ValueError: As `Language.start`, or no token ends a text.
            TypeError: A language does not draw from its masks.
        """
        vocabulary = checked_model(llm).vocabulary
        if not text_tokens.get(vocabulary, stop).stop.size:
            raise ValueError(
                f"{self!r} needs token ids that end a text, and the tokenizer has none: pass "
                f"them as stop"
            )
        first, second = (
            language.start(llm, size, text=text, stop=stop) for language in self._languages
        )
        for part in (first, second):
            if part._has_own_proposal:  # noqa: SLF001 - of the same package
                raise TypeError(
                    f"{type(part).__name__} overrides draw, and the constraint of an "
                    f"intersection draws from masks"
                )
        return _IntersectionConstraint(first, second, vocabulary.size)

    def __repr__(self) -> str:
        first, second = self._languages
        return f"<{first!r} & {second!r}>"


class _IntersectionConstraint(Constraint):
    """Members under two constraints with equal tokens that end a text.

    A member whose text has ended in one language only is dead.
    """

    def __init__(self, first: Constraint, second: Constraint, vocab_size: int) -> None:
        self._parts = first, second
        self._vocab_size = vocab_size
        one, other = (attribute_values(part, "finished") for part in self._parts)
        self.finished: Flags = one & other
        logs: list[Floats] = [attribute_values(part, "log_potential") for part in self._parts]
        self.log_potential: Floats = np.where(one == other, logs[0] + logs[1], -np.inf)

    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return masks as packed bits, and the place of each member's among them.

        Waits until they are computed.
        """
        words, places, _ = self._draw_masks()[0].bits(torch.device("cpu"))
        return words.view(torch.int32), places.numpy()

    def _draw_masks(self) -> tuple[RowMasks, None]:
        first, second = (mask_of_each_member(part, self._vocab_size) for part in self._parts)
        return first & second, None

    def advance(self, token_ids: IntegersLike) -> _IntersectionConstraint:
        """Return the constraint after each member was extended by a token."""
        ids = checked_array(token_ids)
        return self._derived(
            *(checked_result(part.advance(ids), part, "advance") for part in self._parts)
        )

    def __getitem__(self, ancestors: Any) -> _IntersectionConstraint:
        return self._derived(*(part[ancestors] for part in self._parts))

    def _derived(self, first: Constraint, second: Constraint) -> _IntersectionConstraint:
        return _IntersectionConstraint(first, second, self._vocab_size)

    def _prepare_advance(self, token_ids: Integers64) -> None:
        for part in self._parts:
            part._prepare_advance(token_ids)  # noqa: SLF001 - of the same package
