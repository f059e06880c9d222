"""`Context`: a token sequence of one model that is extended in constant time."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from genlm.core.base.errors import TokenIdError
from genlm.core.base.immutable import Immutable
from genlm.core.base.validation import Integers, checked_integers, checked_token_ids, is_integer
from genlm.core.queries.sequence import TokenSequence

if TYPE_CHECKING:
    import numpy as np
    import torch

    from genlm.core.model.adapters import Adapter
    from genlm.core.model.leases import ContextLease, LeaseTable
    from genlm.core.model.lm import AsyncLM
    from genlm.core.queries.query import Reduction
    from genlm.core.rows.masks import MaskLike
    from genlm.core.rows.reductions import DrawnToken, TopTokens
    from genlm.core.rows.row_functions import RowFunction

TokenIds: TypeAlias = "Integers | Context"
TokenBatch: TypeAlias = "Sequence[TokenIds] | np.ndarray[Any, Any] | torch.Tensor"


class Context(Immutable):
    """A sequence of token ids of one model and adapter, created with `AsyncLM.context`.

    Contexts are immutable and hashable; contexts with the same ids, model and adapter are
    equal. The cost of `extend` and of requests does not depend on the length. The engine caches
    the state of a context, such as keys and values, as long as there are references to the
    context or to extensions of it that have not been requested yet.
    """

    __slots__ = ("__weakref__", "_adapter", "_lease", "_lm", "sequence")

    _pickling_error = (
        "a Context belongs to a loaded model and cannot be pickled; pickle its token_ids, "
        "and create it again with the model's method context"
    )

    def __init__(
        self,
        lm: AsyncLM,
        sequence: TokenSequence,
        adapter: Adapter,
        lease: ContextLease | None = None,
    ) -> None:
        self._lm = lm
        self._lease = lease
        self._adapter = adapter
        self.sequence = sequence

    def extend(self, token_ids: SupportsIndex | Integers) -> Context:
        """Return a new context with one or several token ids appended.

        A context can have any number of extensions. No row is computed.

        Raises:
            TokenIdError: An id is outside the vocabulary.
            TokenTypeError: `token_ids` is neither an integer nor a flat sequence of integers.
        """
        size = self._lm.vocabulary.size
        if type(token_ids) is int or is_integer(token_ids):
            token_id = index(token_ids)  # type: ignore[arg-type]
            if not 0 <= token_id < size:
                raise TokenIdError(token_id, len(self.sequence), size)
            packed = token_id.to_bytes(4, sys.byteorder)
        else:
            ids = checked_integers(token_ids)  # type: ignore[arg-type]
            if not ids:
                return self
            packed = checked_token_ids(ids, size)[1]
        sequence = TokenSequence(packed, self.sequence)
        return Context(self._lm, sequence, self._adapter, self._lease)

    def next_token_logprobs(self) -> Coroutine[Any, Any, torch.Tensor]:
        """Return the next-token log-probabilities; see `AsyncLM.next_token_logprobs`.

        Returns:
            A coroutine that returns natural-log probabilities, shape `(vocab_size,)`,
            float32, on the engine's device. The tensor is the caller's.
        """
        return self._lm.next_token_logprobs(self)  # no `await`: it would add a frame

    def next_token_logprobs_sync(self) -> torch.Tensor:
        """Wait for the next-token log-probabilities; see `next_token_logprobs`."""
        return self._lm.next_token_logprobs_sync(self)

    def sample(self, max_tokens: int, **options: Any) -> Coroutine[Any, Any, list[int]]:
        """Draw a continuation; see `AsyncLM.sample`, which has the options."""
        return self._lm.sample(self, max_tokens, **options)

    def score(
        self, continuation: SupportsIndex | Integers
    ) -> Coroutine[Any, Any, torch.Tensor]:
        """Return the log-probability of each token of a continuation; see `AsyncLM.score`.

        Returns:
            A coroutine that returns natural-log probabilities, shape `(k,)` for `k` tokens,
            float32, on the CPU.
        """
        return self._lm.score(self.extend(continuation), len(self))

    def token_logprobs(self, token_ids: Integers) -> Coroutine[Any, Any, torch.Tensor]:
        """Return the log-probabilities of given tokens; see `AsyncLM.token_logprobs`."""
        return self._lm.token_logprobs(self, token_ids)

    def top_tokens(self, k: int) -> Coroutine[Any, Any, TopTokens]:
        """Return the `k` most likely next tokens; see `AsyncLM.top_tokens`."""
        return self._lm.top_tokens(self, k)

    def log_mass(self, mask: MaskLike) -> Coroutine[Any, Any, float]:
        """Return the log-probability of a set of next tokens; see `AsyncLM.log_mass`."""
        return self._lm.log_mass(self, mask)

    def draw(
        self, mask: MaskLike | None = None, **options: Any
    ) -> Coroutine[Any, Any, DrawnToken]:
        """Draw the next token; see `AsyncLM.draw`, which has the options."""
        return self._lm.draw(self, mask, **options)

    def reduce(self, reduction: Reduction | RowFunction) -> Coroutine[Any, Any, Any]:
        """Return a reduction of the row; see `AsyncLM.reduce`."""
        return self._lm.reduce(self, reduction)

    @property
    def lora_name(self) -> str | None:
        """Name of the LoRA adapter, None for the base model."""
        return self._adapter.name

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids, oldest first, assembled in time proportional to their number."""
        return self.sequence.token_ids

    def _update_lease(self, leases: LeaseTable, *, is_computed: bool) -> None:
        """Lease the engine's state of this context, in place of the state of its parent.

        If the engine has not just computed the context, its state is leased only if another
        context has a lease of it.
        """
        key = (self._adapter.engine_name, self.sequence.key)
        if self._lease is None or self._lease.keys != (key,):
            lease = leases.lease([key]) if is_computed else leases.find(key)
            self._lease = lease or self._lease

    @property
    def _key(self) -> tuple[object, ...]:
        # Models that share an engine (`with_lora`) share the scheduler as well.
        return self._lm._scheduler, self._adapter, self.sequence.key  # noqa: SLF001

    def __len__(self) -> int:
        return len(self.sequence)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.sequence.key)

    def __repr__(self) -> str:
        lora = "" if self.lora_name is None else f", lora {self.lora_name!r}"
        ids = self.sequence.ids_from(max(0, len(self) - 8))
        listing = ("" if len(ids) == len(self) else "..., ") + ", ".join(map(str, ids))
        return f"<Context of {self._lm.name!r}{lora}: {len(self)} tokens, {listing}>"
