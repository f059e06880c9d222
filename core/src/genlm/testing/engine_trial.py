"""`EngineTrial`: what a check of an engine is given: models, event loops, the oracle."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st

from genlm import AsyncLM, Capability, OutputCache
from genlm.testing.failure import CheckFailure, NeverEnded, expect
from genlm.testing.probe import Probe
from genlm.testing.profile import Profile
from genlm.testing.rows import describe_difference, row_error
from genlm.testing.sequences import TokenTuple, sequences
from genlm.testing.target import EngineTarget
from genlm.testing.trial import Trial

__all__ = ["EngineTrial"]

T = TypeVar("T")


class EngineTrial(Trial):
    """A trial of an engine.

    Attributes:
        target: The model under test.
        listed: Capabilities that `genlm plugins` lists for its backend, if installed.
        devices: On which rows were seen.
    """

    def __init__(
        self,
        target: EngineTarget,
        profile: Profile,
        seed: int,
        listed: frozenset[str] | None = None,
    ) -> None:
        super().__init__(profile, seed, target.patience_s)
        self.target = target
        self.listed = listed
        self.devices: set[str] = set()
        self._oracle = functools.lru_cache(maxsize=4096)(self._asked_oracle)

    # -- models -----------------------------------------------------------------------

    def load(
        self, probe: Probe | None = None, *, adapters: bool = False, **options: Any
    ) -> AsyncLM:
        """Load the target's model; it is closed when the trial ends.

        Args:
            probe: Put around the engine.
            adapters: Whether to load the target's adapters too.
            **options: Of `EngineTarget.load`.
        """
        if probe is not None:
            options["watch"] = probe
        lm = self.call(lambda: self.target.load(**options))
        self._resources.callback(self._close, lm)
        if probe is not None:
            self._resources.callback(probe.release)
        if adapters:
            for name, path in self.target.adapters.items():
                self.call(functools.partial(lm.add_new_lora, path, name))
        return lm

    def load_probed(self, **options: Any) -> tuple[AsyncLM, Probe]:
        """Load the model with a probe around its engine."""
        probe = Probe(self.patience_s)
        return self.load(probe, **options), probe

    @functools.cached_property
    def lm(self) -> AsyncLM:
        """The model with default options, loaded once per trial."""
        return self.load()

    def _close(self, lm: AsyncLM) -> None:
        # A model that cannot be closed is the business of the checks about closing.
        with contextlib.suppress(NeverEnded):
            self.call(lm.close)

    # -- sequences and their true rows ------------------------------------------------

    @functools.cached_property
    def token_ids(self) -> Sequence[int]:
        """Ids to build sequences of."""
        if self.target.token_ids is not None:
            return self.target.token_ids
        missing = set(self.lm.vocabulary.missing_ids)
        return [i for i in range(self.lm.vocab_size) if i not in missing]

    @functools.cached_property
    def max_length(self) -> int:
        """The longest sequence to ask for."""
        limit = self.lm.max_context
        return self.target.max_length if limit is None else min(limit, self.target.max_length)

    def sequences(self, *, shorter_by: int = 0) -> st.SearchStrategy[TokenTuple]:
        """Sequences of the target's ids.

        Args:
            shorter_by: Room to leave for longer ones made of them.
        """
        return sequences(self.token_ids, max(1, self.max_length - shorter_by))

    def batches(
        self, max_size: int = 6, *, shorter_by: int = 0
    ) -> st.SearchStrategy[list[TokenTuple]]:
        """Ragged batches, duplicates possible."""
        return st.lists(self.sequences(shorter_by=shorter_by), min_size=1, max_size=max_size)

    def lengths(self) -> st.SearchStrategy[int]:
        """Lengths of sequences."""
        return st.integers(1, self.max_length)

    def some_sequences(self, count: int, *, salt: int = 0) -> list[TokenTuple]:
        """Different sequences of mixed lengths, decided by the seed."""
        generator = np.random.default_rng([self.seed, salt])
        ids = np.asarray(self.token_ids)
        found: dict[TokenTuple, None] = {}
        while len(found) < count:
            length = int(generator.integers(2, max(3, self.max_length - 1)))
            found[tuple(generator.choice(ids, length).tolist())] = None
        return list(found)

    def adapter_names(self) -> list[str]:
        """The target's adapters, of which a target that declares them brings two."""
        names = list(self.target.adapters)
        expect(
            len(names) >= 2,
            "a target of an engine with 'lora' to bring at least two adapters",
            f"{len(names)}",
        )
        return names

    def expected(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """The true row: shape `(vocab_size,)`, float64, on the CPU; do not change it."""
        return self._oracle(tuple(token_ids), adapter)

    def check_row(
        self,
        row: torch.Tensor,
        token_ids: Sequence[int],
        adapter: str | None = None,
        /,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless `row` is the true row of a sequence."""
        expected = self.expected(token_ids, adapter)
        limit = self.target.largest_error
        if isinstance(row, torch.Tensor):
            self.devices.add(str(row.device))
            if row_error(row, expected) <= limit:
                return
        whose = f"the row of {tuple(token_ids)}"
        if adapter is not None:
            whose += f" with adapter {adapter!r}"
        raise CheckFailure(
            f"{whose}, every log-probability within {limit:g}",
            describe_difference(row, expected),
            example,
        )

    def check_rows(
        self,
        rows: Sequence[torch.Tensor] | torch.Tensor,
        asked: Sequence[Sequence[int]],
        adapter: str | None = None,
        /,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless each row is that of its sequence."""
        expect(len(rows) == len(asked), f"{len(asked)} rows", len(rows), **example)
        for position, (row, token_ids) in enumerate(zip(rows, asked, strict=True)):
            self.check_row(row, token_ids, adapter, position=position, **example)

    # -- errors -----------------------------------------------------------------------

    def expect_error(
        self,
        error: type[BaseException],
        call: Callable[[], Any],
        /,
        **example: Any,
    ) -> BaseException:
        """Raise `CheckFailure` unless a call, or the coroutine it returns, raises `error`.

        Returns:
            What was raised.
        """

        async def awaited(coroutine: Any) -> Any:
            return await coroutine

        result: Any
        try:
            result = self.call(call)
            if inspect.isawaitable(result):
                result = self.run(awaited(result))
        except Exception as raised:  # noqa: BLE001 - judged below
            result = raised
        return self.expect_raised(error, result, **example)

    def expect_raised(
        self, error: type[BaseException], found: object, /, **example: Any
    ) -> BaseException:
        """Raise `CheckFailure` unless `found` is an exception of the class `error`."""
        if isinstance(found, error):
            return found
        words = "a result" if isinstance(found, torch.Tensor) else repr(found)
        raise CheckFailure(error.__name__, words, example)

    def _asked_oracle(self, token_ids: TokenTuple, adapter: str | None) -> torch.Tensor:
        if self.target.oracle is None:
            row = self._witness.next_token_logprobs_sync(token_ids, lora_name=adapter)
        else:
            row = torch.as_tensor(self.target.oracle(token_ids, adapter))
        return row.detach().cpu().double()

    @functools.cached_property
    def _witness(self) -> AsyncLM:
        """The same model, asked for one row at a time, where there is no oracle."""
        declared = Capability.LORA in self.lm.capabilities
        return self.load(adapters=declared, output_cache=OutputCache(0))
