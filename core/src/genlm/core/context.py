"""`Context`: a handle of a token sequence of one model, extended in constant time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import ref

from genlm.core.errors import TokenIdError
from genlm.core.forking import renew_in_forks
from genlm.core.sequence import TokenSequence
from genlm.core.validation import checked_integers, checked_token_ids

if TYPE_CHECKING:
    import torch

    from genlm.core.lm import AsyncLM
    from genlm.core.masks import MaskLike
    from genlm.core.reductions import DrawnToken, Reduction, TopTokens
    from genlm.core.validation import Integers

__all__ = ["Context", "ContextKey", "Hold", "Holds"]

ContextKey = tuple[str | None, bytes]
"""The engine's name of the adapter, and the key of the token sequence."""


class Hold:
    """Keeps what the engine has for one context while some `Context` refers to it."""

    __slots__ = ("__weakref__",)


class Holds:
    """The holds of one model; equal contexts share one.

    Attributes:
        on_drop: Called once for each hold, with the key of its context, when the last
            reference to the hold has gone; on any thread, also during garbage collection.
    """

    def __init__(self) -> None:
        self.on_drop: Callable[[ContextKey], object] = lambda _key: None
        # A reference stays here, dead, until the key is released or held again: its callback
        # may run on a thread that has the lock, so it removes nothing.
        self._by_key: dict[ContextKey, ref[Hold]] = {}
        self._lock = threading.Lock()
        renew_in_forks(self)

    def find(self, key: ContextKey) -> Hold | None:
        """Return the hold of a context if there is one."""
        reference = self._by_key.get(key)
        return None if reference is None else reference()

    def of(self, key: ContextKey) -> Hold:
        """Return the hold of a context, which is made if there is none."""
        with self._lock:
            hold = self.find(key)
            if hold is None:
                hold, on_drop = Hold(), self.on_drop
                self._by_key[key] = ref(hold, lambda _dead: on_drop(key))
        return hold

    def release(self, engine: Any, keys: list[ContextKey]) -> None:
        """Have the engine let go of what it has for contexts that are not held again."""
        for key in keys:
            with self._lock:
                is_held = self.find(key) is not None
                if not is_held:
                    self._by_key.pop(key, None)
            if not is_held:
                engine.release_context(*key)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


class Context:
    """A sequence of token ids of one model and adapter; make it with `AsyncLM.context`.

    Immutable and hashable: contexts of the same ids, model and adapter are equal, however they
    were made. `extend` and requests cost the same for long contexts as for short ones. What the
    engine keeps for a context, such as its keys and values, may be freed once neither the
    context nor an extension of it that was not asked yet is referred to.
    """

    __slots__ = ("__weakref__", "_hold", "_lm", "adapter", "lora_name", "sequence")

    def __init__(
        self,
        lm: AsyncLM,
        sequence: TokenSequence,
        lora_name: str | None,
        adapter: str | None,
        hold: Hold | None = None,
    ) -> None:
        self._lm = lm
        self._hold = hold
        self.adapter = adapter
        self.sequence = sequence
        self.lora_name = lora_name

    def extend(self, token_ids: SupportsIndex | Integers) -> Context:
        """Return the context that continues this one by a token id, or by several.

        Any number of extensions of one context may exist. Nothing is computed.

        Raises:
            TokenIdError: An id outside the vocabulary.
            TokenTypeError: Neither an integer nor a flat sequence of integers.
        """
        if type(token_ids) is int:
            packed = self._packed(token_ids)
        else:
            try:
                packed = self._packed(index(token_ids))  # type: ignore[arg-type]
            except TypeError:
                packed = self._all_packed(token_ids)  # type: ignore[arg-type]
        if not packed:
            return self
        sequence = TokenSequence(packed, self.sequence)
        return Context(self._lm, sequence, self.lora_name, self.adapter, self._hold)

    def _packed(self, token_id: int) -> bytes:
        size = self._lm.vocabulary.size
        if not 0 <= token_id < size:
            raise TokenIdError(token_id, len(self.sequence), size)
        return token_id.to_bytes(4, sys.byteorder)

    def _all_packed(self, token_ids: Integers) -> bytes:
        ids = checked_integers(token_ids)
        size = self._lm.vocabulary.size
        return checked_token_ids(ids, vocab_size=size, max_context=None)[1] if ids else b""

    def next_token_logprobs(self) -> Coroutine[Any, Any, torch.Tensor]:
        """Score every possible next token; see `AsyncLM.next_token_logprobs`.

        Returns:
            A coroutine that returns natural-log probabilities, shape `(vocab_size,)`,
            float32, on the engine's device. The tensor is the caller's.
        """
        return self._lm.next_token_logprobs(self)  # without a frame of its own

    def next_token_logprobs_sync(self) -> torch.Tensor:
        """Score every possible next token and wait; see `AsyncLM.next_token_logprobs_sync`."""
        return self._lm.next_token_logprobs_sync(self)

    def sample(
        self,
        max_tokens: int,
        eos_token_ids: Integers = (),
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ) -> Coroutine[Any, Any, list[int]]:
        """Draw a continuation; see `AsyncLM.sample`, which has all options."""
        return self._lm.sample(self, max_tokens, eos_token_ids, temperature, seed, **options)

    def token_logprobs(self, token_ids: Integers) -> Coroutine[Any, Any, torch.Tensor]:
        """Return the log-probabilities of given tokens; see `AsyncLM.token_logprobs`."""
        return self._lm.token_logprobs(self, token_ids)

    def top_k(self, k: int) -> Coroutine[Any, Any, TopTokens]:
        """Return the `k` most likely next tokens; see `AsyncLM.top_k`."""
        return self._lm.top_k(self, k)

    def log_mass(self, mask: MaskLike) -> Coroutine[Any, Any, float]:
        """Return the log-probability of a set of tokens; see `AsyncLM.log_mass`."""
        return self._lm.log_mass(self, mask)

    def draw(
        self,
        mask: MaskLike | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Coroutine[Any, Any, DrawnToken]:
        """Draw the next token; see `AsyncLM.draw`."""
        return self._lm.draw(
            self, mask, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )

    def reduce(self, reduction: Reduction) -> Coroutine[Any, Any, Any]:
        """Return a reduction of the row; see `AsyncLM.reduce`."""
        return self._lm.reduce(self, reduction)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids, oldest first, put together in time proportional to their number."""
        return self.sequence.token_ids

    def is_of(self, model: object) -> bool:
        """Whether it belongs to the model that `AsyncLM` identifies by `model`."""
        return self._lm._model is model  # noqa: SLF001 - a part of AsyncLM

    def hold(self, hold: Hold) -> None:
        """Keep what the engine has for this context, instead of for the one that it extends."""
        self._hold = hold

    @property
    def _key(self) -> tuple[object, ...]:
        # Models that share an engine (`with_lora`) share `_model` as well.
        return self._lm._model, self.adapter, self.sequence.key  # noqa: SLF001

    def __len__(self) -> int:
        return len(self.sequence)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.sequence.key)

    def __repr__(self) -> str:
        lora = "" if self.lora_name is None else f", lora {self.lora_name!r}"
        ids = self.sequence.ids_from(max(0, len(self) - 8))
        shown = ", ".join(map(str, ids))
        more = "" if len(ids) == len(self) else "..., "
        return f"<Context of {self._lm.name!r}{lora}: {len(self)} tokens, {more}{shown}>"

    def __copy__(self) -> Context:
        return self

    def __deepcopy__(self, _memo: object) -> Context:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Context belongs to a loaded model and cannot be pickled; pickle its token_ids, "
            "and make it again with the model's method context"
        )
