"""`Trial`: what a check is given: the target, examples, an event loop, and a notebook.

One trial serves one check of one target and closes everything that the check opened.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from genlm import AsyncLM, Capability, OutputCache
from genlm.testing.background import LoopThread, call_together
from genlm.testing.failure import CheckFailure, NeverEnded, expect
from genlm.testing.probe import Probe
from genlm.testing.profile import Profile
from genlm.testing.rows import describe_difference, row_error
from genlm.testing.sequences import TokenTuple, sequences
from genlm.testing.target import EngineTarget, TrieTarget

__all__ = ["EngineTrial", "Trial", "TrieTrial", "hypothesis_settings"]

T = TypeVar("T")


def hypothesis_settings(
    examples: int, steps: int = 50, *, shrink: bool = True
) -> hypothesis.settings:
    """Settings under which the same seed gives the same examples, without a database."""
    phases = [hypothesis.Phase.generate, hypothesis.Phase.shrink]
    return hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=phases if shrink else phases[:1],
    )


class Trial:
    """Examples and bookkeeping for one check; a context manager.

    Args:
        profile: How thorough to be.
        seed: Decides every example.
        patience_s: How long any one call may take.

    Attributes:
        cases: How often each interesting case occurred.
    """

    def __init__(self, profile: Profile, seed: int, patience_s: float) -> None:
        self.profile = profile
        self.seed = seed
        self.patience_s = patience_s
        self.cases: Counter[str] = Counter()
        self._resources = contextlib.ExitStack()
        self._loops: list[LoopThread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._resources.close()
        # Where the check has failed already, an unreceived error is most likely a result.
        complaints = [text for loop in self._loops for text in loop.complaints]
        expect(
            bool(error) or not complaints,
            "no error that reaches an event loop's exception handler",
            "; ".join(complaints[:3]),
        )

    def saw(self, case: str, times: int = 1) -> None:
        """Note that an interesting case occurred."""
        self.cases[case] += times

    def generator(self) -> np.random.Generator:
        """A new source of randomness; the same one for the same seed."""
        return np.random.default_rng(self.seed)

    def for_all(
        self,
        law: Callable[..., None],
        *,
        examples: int | None = None,
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        """Call `law` with many examples; raise what it raised for the smallest failing one.

        Args:
            law: Takes one keyword argument per strategy.
            examples: How many; by default as many as the profile says.
            **strategies: Make the arguments.
        """

        # `@given` is applied here, not on a method: one shared by several targets would
        # fail Hypothesis' health check on differing executors.
        @hypothesis.seed(self.seed)
        @hypothesis_settings(examples or self.profile.examples, shrink=self.profile.shrink)
        @hypothesis.given(**strategies)
        def one_example(**values: Any) -> None:
            law(**values)

        one_example()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread of its own.

        Raises:
            NeverEnded: It took too long.
        """
        return self.call_together([function])[0]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Block until a condition that no callback announces is true.

        Raises:
            NeverEnded: It took too long.
        """
        give_up_s = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > give_up_s:
                raise NeverEnded(f"waiting for {what}", self.patience_s)
            time.sleep(1e-4)

    def call_together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call functions at the same time, each on a thread of its own.

        Raises:
            NeverEnded: One took too long.
        """
        return call_together(functions, self.patience_s)


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
        self.loop = self.new_loop()
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

    # -- event loops ------------------------------------------------------------------

    def new_loop(self) -> LoopThread:
        """An event loop on a thread of its own, closed when the trial ends."""
        loop = LoopThread()
        self._loops.append(loop)
        self._resources.callback(loop.close)
        return loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the trial's event loop.

        Raises:
            NeverEnded: It took too long.
        """
        return self.loop.run(coroutine, self.patience_s)

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
        return row.detach().double().cpu()

    @functools.cached_property
    def _witness(self) -> AsyncLM:
        """The same model, asked for one row at a time, where there is no oracle."""
        declared = Capability.LORA in self.lm.capabilities
        return self.load(adapters=declared, output_cache=OutputCache(0))


class TrieTrial(Trial):
    """A trial of a token trie.

    Attributes:
        target: The trie under test.
    """

    def __init__(self, target: TrieTarget, profile: Profile, seed: int) -> None:
        super().__init__(profile, seed, target.patience_s)
        self.target = target
