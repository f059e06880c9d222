"""`EngineFixture`: models, sequences and the oracle for a check of an engine."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from genlm import AsyncLM, Capability, Context, DrawnTokens, OutputCache
from genlm.plugin import stream_seeds, stream_uniform
from genlm.testing.check import CheckFailure, expect
from genlm.testing.comparison import describe_difference, largest_difference
from genlm.testing.diagnosis import diagnose_row
from genlm.testing.draw_oracle import DrawOracle, settings_of_member
from genlm.testing.expected_members import ExpectedMembers
from genlm.testing.fixture import Fixture
from genlm.testing.probes import EngineProbe
from genlm.testing.target import EngineTarget, Oracle, TokenTuple

_MEMBERS = 9
"""Minimum number of members of the populations of a check."""

_TRIES = 1000
"""Maximum number of random sequences for each distinct one that a check needs."""

_MAX_LISTED = 4
"""Maximum number of log-probabilities that a failure lists; of more, it shows the worst."""


@functools.lru_cache(maxsize=4096)
def _oracle_row(oracle: Oracle, token_ids: TokenTuple, adapter: str | None) -> torch.Tensor:
    """Compute an oracle's row, once for all checks and targets that use the oracle."""
    row = oracle(token_ids, adapter)
    try:
        return torch.as_tensor(row).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"the target's oracle returned {row!r:.80}; expected an array of log-probabilities"
        ) from error


class EngineFixture(Fixture):
    """Fixture of a check of an engine.

    Attributes:
        target: The model under test.
        listed: Capabilities in the `BackendSpec` of the backend, if it is installed.
    """

    def __init__(
        self,
        target: EngineTarget,
        profile: hypothesis.settings,
        seed: int,
        listed: frozenset[str] | None = None,
    ) -> None:
        super().__init__(profile, seed, target.timeout_s)
        self.target = target
        self.listed = listed
        self._expected = (
            functools.cache(self._single_row)
            if target.oracle is None
            else functools.partial(_oracle_row, target.oracle)
        )

    # -- models -----------------------------------------------------------------------

    def load(self, *, adapters: bool = False, **options: Any) -> AsyncLM:
        """Load the target's model; it is closed with the fixture.

        Args:
            adapters: Whether to load `adapters` too.
            **options: Options of `EngineTarget.load`.
        """
        lm = self.call(lambda: self.target.load(**options))
        self._resources.callback(self.call, lm.close)
        if adapters:
            for name, path in self.adapters.items():
                self.call(lm.load_lora, path, name)
        return lm

    def load_probed(self, **options: Any) -> tuple[AsyncLM, EngineProbe]:
        """Load the model with a probe around its engine."""
        probe = EngineProbe(self.timeout_s)
        lm = self.load(watch=probe, **options)
        self._resources.callback(probe.release)
        return lm, probe

    @functools.cached_property
    def lm(self) -> AsyncLM:
        """The model with default options, loaded on first use."""
        return self.load()

    @property
    def adapters(self) -> Mapping[str, str]:
        """Folder of each of the target's adapters, by name, if the engine declares adapters."""
        return self.target.adapters if Capability.LORA in self.lm.capabilities else {}

    # -- sequences and their expected rows --------------------------------------------

    @functools.cached_property
    def token_ids(self) -> Sequence[int]:
        """Ids from which sequences are built."""
        if self.target.token_ids is not None:
            return self.target.token_ids
        missing = set(self.lm.vocabulary.missing_ids)
        return [i for i in range(self.lm.vocab_size) if i not in missing]

    @functools.cached_property
    def max_length(self) -> int:
        """Maximum length of a requested sequence."""
        limit = self.lm.max_context
        return self.target.max_length if limit is None else min(limit, self.target.max_length)

    @functools.cached_property
    def members(self) -> int:
        """Number of members of a population that the engine does not divide into queries."""
        return max(_MEMBERS, getattr(self.lm.engine, "smallest_group", 0))

    def sequences(self, *, shorter_by: int = 0) -> st.SearchStrategy[TokenTuple]:
        """Sequences of at least one of the target's ids, half of them long.

        Lists of Hypothesis have about six elements, fewer than the windows and blocks of
        engines.

        Args:
            shorter_by: Number of tokens that a check appends to them.
        """
        ids, longest = st.sampled_from(self.token_ids), max(1, self.max_length - shorter_by)
        long = st.lists(ids, min_size=max(1, longest // 2), max_size=longest)
        return st.one_of(st.lists(ids, min_size=1, max_size=longest), long).map(tuple)

    def batches(self, max_size: int = 6) -> st.SearchStrategy[list[TokenTuple]]:
        """Ragged batches, possibly with duplicates."""
        return st.lists(self.sequences(), min_size=1, max_size=max_size)

    def some_sequences(self, count: int, *, salt: int = 0) -> list[TokenTuple]:
        """Distinct sequences of mixed lengths, derived from the seed.

        Raises `CheckFailure` if the target has fewer.
        """
        generator = np.random.default_rng([self.seed, salt])
        ids = np.asarray(self.token_ids)
        distinct: dict[TokenTuple, None] = {}
        for _ in range(_TRIES * count):
            length = int(generator.integers(2, max(3, self.max_length - 1)))
            distinct[tuple(generator.choice(ids, length).tolist())] = None
            if len(distinct) == count:
                return list(distinct)
        raise CheckFailure(
            f"a target with at least {count} sequences of `token_ids` and `max_length`",
            f"{len(distinct)}",
            {"max_length": self.max_length},
        )

    def adapter_names(self) -> list[str]:
        """Names of the target's adapters; raises `CheckFailure` if there are fewer than two."""
        names = list(self.adapters)
        expect(
            len(names) >= 2,
            "a target of an engine with 'lora' to have at least two adapters",
            f"{len(names)}",
        )
        return names

    def expected(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """The oracle's row: shape `(vocab_size,)`, float64, on the CPU; do not modify."""
        return self._expected(tuple(token_ids), adapter)

    def use_weights(self, number: int) -> None:
        """Compare later rows with the oracle of one of the target's sets of weights."""
        oracle = self.target.weights[number][1]
        self._expected = functools.partial(_oracle_row, oracle)

    def expected_rows(
        self, token_ids: Sequence[int], start: int = 1, adapter: str | None = None
    ) -> torch.Tensor:
        """The oracle's rows after each prefix of at least `start` tokens, one row each.

        The longest prefix comes first: `TinyModel` computes the others in the same pass.
        """
        ends = range(len(token_ids), start - 1, -1)
        rows = [self.expected(token_ids[:end], adapter) for end in ends]
        return torch.stack(rows[::-1]) if rows else torch.empty(0, self.lm.vocab_size)

    # -- comparisons with the oracle ---------------------------------------------------

    def check_row(
        self,
        row: torch.Tensor,
        token_ids: Sequence[int],
        adapter: str | None = None,
        /,
        *,
        others: Sequence[Sequence[int]] = (),
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless `row` is the expected row of a sequence.

        Args:
            row: The row, or the error of the request.
            token_ids: The sequence.
            adapter: Name of the adapter, None for the base model.
            others: Sequences that were requested before or at the same time, whose rows a wrong
                row is compared with.
            **example: Reported with the failure.
        """
        expected = self.expected(token_ids, adapter)
        limit = self.target.largest_error
        if isinstance(row, torch.Tensor):
            self.devices.add(str(row.device))
            if largest_difference(row, expected) <= limit:
                return
        subject = f"the row of {tuple(token_ids)}"
        if adapter is not None:
            subject += f" with adapter {adapter!r}"
        raise CheckFailure(
            f"{subject}, every log-probability within {limit:g}",
            describe_difference(row, expected),
            example,
            functools.partial(self._diagnose, row, tuple(token_ids), adapter, others),
        )

    def _diagnose(
        self,
        row: Any,
        token_ids: TokenTuple,
        adapter: str | None,
        others: Sequence[Sequence[int]],
    ) -> str:
        if self.target.oracle is None or not isinstance(row, torch.Tensor):
            return ""
        return diagnose_row(
            row,
            token_ids,
            adapter,
            others=list(dict.fromkeys(map(tuple, others))),
            adapters=self.target.adapters,
            oracle=self._expected,
            limit=self.target.largest_error,
        )

    def check_rows(
        self,
        rows: Sequence[torch.Tensor] | torch.Tensor,
        token_sequences: Sequence[Sequence[int]],
        adapter: str | None = None,
        /,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless each row is the expected row of its sequence."""
        count = len(token_sequences)
        expect(len(rows) == count, f"{count} rows", len(rows), **example)
        for position, (row, token_ids) in enumerate(zip(rows, token_sequences, strict=True)):
            self.check_row(
                row, token_ids, adapter, others=token_sequences, position=position, **example
            )

    def check_request(
        self,
        lm: AsyncLM,
        token_ids: Sequence[int],
        adapter: str | None = None,
        /,
        *,
        use_cache: bool = True,
        **example: Any,
    ) -> None:
        """Request one row; raise `CheckFailure` unless it is the expected row."""
        row = self.run(
            lm.next_token_logprobs(token_ids, lora_name=adapter, use_cache=use_cache)
        )
        self.check_row(row, token_ids, adapter, **example)

    def check_batch(
        self, lm: AsyncLM, token_sequences: Sequence[TokenTuple], /, **example: Any
    ) -> None:
        """Request a batch; raise `CheckFailure` unless its rows are the expected ones."""
        rows: torch.Tensor = self.run(lm.batch_next_token_logprobs(token_sequences))
        self.check_rows(rows, token_sequences, **example)

    def check_context(
        self, context: Context, adapter: str | None = None, /, **example: Any
    ) -> None:
        """Request the row of a context; raise `CheckFailure` unless it is the expected row."""
        row = self.run(context.next_token_logprobs())
        self.check_row(row, context.token_ids, adapter, **example)

    def check_members(self, members: ExpectedMembers, /, **example: Any) -> None:
        """Raise `CheckFailure` unless the members and their rows are the expected ones."""
        found = [context.token_ids for context in members.population]
        expected = list(members.sequences)
        expect(found == expected, f"members {expected}", found, **example)
        rows = self.run(members.population.next_token_logprobs())
        self.check_rows(rows, expected, members.adapter, **example)

    def check_logprobs(self, logprobs: Any, expected: Any, /, **example: Any) -> None:
        """Raise `CheckFailure` unless log-probabilities are those expected, up to rounding.

        Args:
            logprobs: A number or a tensor on any device.
            expected: A number, or a tensor of the same shape; may contain `-inf`.
            **example: Reported with the failure.
        """
        found, right = (torch.as_tensor(x, dtype=torch.float64) for x in (logprobs, expected))
        limit = self.target.largest_error
        if largest_difference(found, right) <= limit:
            return
        subject, result = str(right.tolist()), str(found.tolist())
        if right.ndim == 1 and len(right) > _MAX_LISTED:
            subject = f"{len(right)} log-probabilities"
            result = describe_difference(found, right, "position")
        raise CheckFailure(
            f"{subject}, every log-probability within {limit:g}", result, example
        )

    def draw_oracle(
        self, token_ids: Sequence[int], adapter: str | None = None, **settings: Any
    ) -> DrawOracle:
        """Return the oracle of a draw after a sequence; for the settings see `DrawOracle`."""
        row, error = self.expected(token_ids, adapter), self.target.largest_error
        return DrawOracle(row, error, **settings)

    def check_draws(
        self,
        members: ExpectedMembers,
        settings: Mapping[str, Any],
        seed: int,
        drawn: DrawnTokens,
        logprobs: torch.Tensor,
        /,
        **example: Any,
    ) -> None:
        """Raise `CheckFailure` unless the seed draws the token of each member.

        Args:
            members: The members before the draw.
            settings: The settings of the draw, as arguments of `Population.draw`.
            seed: The seed of the draw.
            drawn: The tokens.
            logprobs: Log-probabilities of the tokens with the same settings, shape `(n,)`.
            **example: Reported with the failure.
        """
        seeds = stream_seeds(seed, len(members.sequences))
        for member, token_ids in enumerate(members.sequences):
            of_member = settings_of_member(settings, member)
            oracle = self.draw_oracle(token_ids, members.adapter, **of_member)
            found = [float(column[member]) for column in drawn]
            is_finished = members.finished[member]
            if is_finished or oracle.is_impossible:
                logprob = 0.0 if is_finished else -math.inf
                no_token = [-1, logprob, logprob, 0.0]
                expect(found == no_token, str(no_token), found, member=member, **example)
                continue
            token_id = int(found[0])
            expected = oracle.row[token_id], oracle.log_mass
            self.check_logprobs(found[1:3], expected, member=member, **example)
            uniform = stream_uniform(seeds[member], members.step)
            for draw_logprob in (found[3], float(logprobs[member])):
                oracle.check(token_id, uniform, draw_logprob, member=member, **example)

    def _single_row(self, token_ids: TokenTuple, adapter: str | None) -> torch.Tensor:
        row = self._reference_lm.next_token_logprobs_sync(token_ids, lora_name=adapter)
        return row.detach().cpu().double()

    @functools.cached_property
    def _reference_lm(self) -> AsyncLM:
        """The same model, evaluated one row at a time: the reference if there is no oracle."""
        return self.load(adapters=True, output_cache=OutputCache(0))
