"""`Constraint` and `Language`: the allowed continuations of a population.

A `Language` is a set of texts. Its method `start` returns a `Constraint`, which follows the
members of one population. This module defines the rules of all constraints: a stop token ends a
complete text, members that violated the constraint are dead, and special tokens have no text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from genlm.core.lm import AsyncLM
    from genlm.core.population import DrawnTokens, Population
    from genlm.core.row_masks import MasksLike
    from genlm.core.validation import Integers
    from genlm.core.vocab import Vocabulary

__all__ = [
    "Constraint",
    "Language",
    "PerVocabulary",
    "TextTokens",
    "chosen_members",
    "token_column",
]

T = TypeVar("T")

Flags: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Integers64: TypeAlias = npt.NDArray[np.int64]
IntegersLike: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor"


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
        """


class Constraint(ABC):
    """The allowed continuations of N members; immutable.

    Subclasses implement `masks`, `advance` and indexing, and set the attributes.

    Attributes:
        finished: Whether the text of each member has ended, shape `(n,)`, bool.
        log_potential: Log of a factor of each member's probability, shape `(n,)`, float64: 0
            for members that satisfy the constraint, `-inf` for dead ones, which violated it.
            Soft constraints have other values.
    """

    finished: Flags
    log_potential: Floats

    @abstractmethod
    def masks(self) -> tuple[MasksLike, Integers64 | None]:
        """Return the allowed next tokens of each member.

        Returns:
            The arguments `masks` and `mask_index` of `Population.draw`. The mask is empty for
            dead members and for those without continuation, and arbitrary for finished ones.
        """

    @abstractmethod
    def advance(self, token_ids: IntegersLike) -> Self:
        """Return the constraint after each member was extended by a token.

        Args:
            token_ids: Token ids, shape `(n,)`; -1 for none. Finished and dead members do not
                change.

        Raises:
            ValueError: The shape is another one.
        """

    @abstractmethod
    def __getitem__(self, ancestors: Any) -> Self:
        """Return the constraint of selected members, possibly with repetitions."""

    def __len__(self) -> int:
        return len(self.finished)

    async def draw(
        self, population: Population, *, temperature: float = 1.0, seed: int | None = None
    ) -> DrawnTokens:
        """Draw the next token of each member among the allowed tokens.

        Args:
            population: Population of the same size. Its finished members get token -1.
            temperature: As `Population.draw`.
            seed: As `Population.draw`.

        Returns:
            As `Population.draw`. `log_mass` is the log of an unbiased estimate if the mass is
            not known; `logprobs - draw_logprob` is the log-weight of each draw.

        Raises:
            GenlmError: As `Population.draw`.
        """
        masks, index = self.masks()
        return await population.finish(self.finished).draw(
            masks, mask_index=index, temperature=temperature, seed=seed
        )

    def __repr__(self) -> str:
        dead = np.isneginf(self.log_potential)
        return (
            f"<{type(self).__name__}: {len(self)} members, {int(self.finished.sum())} "
            f"finished, {int(dead.sum())} dead>"
        )


class TextTokens(NamedTuple):
    """The bytes and the stop tokens of a vocabulary.

    Attributes:
        texts: Bytes of each token id; empty for special tokens, ids without a token and tokens
            without bytes, which are not part of any text.
        stop: Token ids that end a text, ascending, int64.
    """

    texts: list[bytes]
    stop: Integers64

    @classmethod
    def of(cls, vocabulary: Vocabulary, stop: Integers | None) -> TextTokens:
        """Return the texts and stop tokens of a vocabulary.

        Raises:
            ValueError: An id of `stop` is outside the vocabulary.
        """
        end = vocabulary.eos_token_id
        given = ([] if end is None else [end]) if stop is None else stop
        ids = np.unique(np.asarray(given, np.int64))
        if ids.size and not 0 <= ids[0] <= ids[-1] < vocabulary.size:
            raise ValueError(f"stop={stop!r}; expected ids from 0 to {vocabulary.size - 1}")
        apart = vocabulary.special_ids.union(vocabulary.missing_ids, ids.tolist())
        texts = [
            b"" if token.token_id in apart else bytes(token.byte_string)
            for token in vocabulary.byte_vocab
        ]
        return cls(texts, ids)

    def pack(self, allowed: Flags) -> torch.Tensor:
        """Return booleans of shape `(n, vocab_size)` as packed bits, int32."""
        count, size = allowed.shape
        padded = np.zeros((count, -(-size // 32) * 32), np.bool_)
        padded[:, :size] = allowed
        return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


class PerVocabulary(Generic[T]):
    """A value that a language computes once per vocabulary and stop tokens.

    Args:
        build: Function that computes the value on first use.
    """

    def __init__(self, build: Callable[[TextTokens], T]) -> None:
        self._build = build
        self._found: WeakKeyDictionary[Vocabulary, dict[bytes, T]] = WeakKeyDictionary()

    def get(self, vocabulary: Vocabulary, stop: Integers | None) -> T:
        """Return the value for a vocabulary; raises as `TextTokens.of`."""
        tokens = TextTokens.of(vocabulary, stop)
        found = self._found.setdefault(vocabulary, {})
        key = tokens.stop.tobytes()
        if key not in found:
            found[key] = self._build(tokens)
        return found[key]


def token_column(token_ids: IntegersLike, count: int) -> Integers64:
    """Return the tokens of `count` members as an array.

    Raises:
        ValueError: The shape is not `(count,)`.
    """
    given = token_ids.cpu().numpy() if isinstance(token_ids, torch.Tensor) else token_ids
    found = np.asarray(given, np.int64)
    if found.shape != (count,):
        raise ValueError(f"token ids of shape {found.shape} for {count} members")
    return found


def chosen_members(ancestors: Any) -> Any:
    """Return an index of members in a form that numpy accepts: a slice or an array."""
    if isinstance(ancestors, torch.Tensor):
        return ancestors.cpu().numpy()
    return ancestors if isinstance(ancestors, slice) else np.asarray(ancestors)
