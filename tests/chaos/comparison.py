"""`Comparison`: checks the form of every answer, and a random sample against the oracle."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from genlm import AsyncLM, DrawnTokens
from genlm.testing import EngineTarget
from genlm.testing.check import CheckFailure, expect
from genlm.testing.comparison import describe_difference, largest_difference
from genlm.testing.draw_oracle import DrawOracle
from genlm.testing.target import TokenTuple

from .plan import Ask

ASKED_AGAIN = 8
"""Contexts that are evaluated again, alone, while the callers are paused."""


class Sampled(NamedTuple):
    """A copy of a row, made before its caller could modify it."""

    row: torch.Tensor
    context: TokenTuple
    adapter: str | None
    asked: str


class SampledMember(NamedTuple):
    """A token that was drawn for a member of a population, and its log-probabilities."""

    token_id: int
    logprob: float
    log_mass: float
    mask: torch.Tensor | None
    context: TokenTuple
    adapter: str | None
    asked: str


class Comparison:
    """Checks every answer; compares a random share of them with the oracle's rows.

    Args:
        lm: The model under test.
        target: Has the oracle; without one, rows are compared with the model's own.
        share: Share of the rows that are compared.
        draw: Selects the contexts that are evaluated again.
    """

    def __init__(
        self, lm: AsyncLM, target: EngineTarget, share: float, draw: random.Random
    ) -> None:
        self._lm = lm
        self._target = target
        self._share = share
        self._draw = draw
        self._lock = threading.Lock()
        self._rows: list[Sampled] = []
        self._last: list[Sampled] = []
        self._draws: list[tuple[Ask, list[int]]] = []
        self._members: list[SampledMember] = []
        self._true_rows: dict[tuple[TokenTuple, str | None], torch.Tensor] = {}
        self.compared = 0

    def look(self, row: object, context: TokenTuple, ask: Ask, draw: random.Random) -> None:
        """Raise `CheckFailure` unless this is a row; sample it for `compare`."""
        expected = f"a row of {self._lm.vocab_size} float32, logsumexp 0"
        good = (
            isinstance(row, torch.Tensor)
            and tuple(row.shape) == (self._lm.vocab_size,)
            and row.dtype == torch.float32
        )
        expect(good, expected, _words(row), asked=str(ask))
        total = float(row.logsumexp(0))
        expect(abs(total) < 1e-3, expected, f"logsumexp {total:.6g}", asked=str(ask))
        if draw.random() < self._share:
            with self._lock:
                self._rows.append(Sampled(row.clone(), context, ask.adapter, str(ask)))

    def look_at_draws(self, drawn: object, ask: Ask, stop: int, draw: random.Random) -> None:
        """Raise `CheckFailure` unless these are drawn tokens; sample them for `compare`."""
        good = isinstance(drawn, list) and len(drawn) <= ask.max_tokens
        good = good and all(0 <= i < self._lm.vocab_size and i != stop for i in drawn)
        expected = f"at most {ask.max_tokens} ids, {stop} not among them"
        expect(good, expected, str(drawn), asked=str(ask))
        if ask.temperature == 0 and draw.random() < self._share:
            with self._lock:
                self._draws.append((ask, drawn))

    def look_at_members(
        self, drawn: DrawnTokens, masks: torch.Tensor | None, ask: Ask, draw: random.Random
    ) -> None:
        """Raise `CheckFailure` unless a token was drawn for each member; sample for `compare`.

        Args:
            drawn: Tokens of the members with the sequences `ask.contexts`.
            masks: One mask for all members, or one for each; None if all tokens are allowed.
            ask: The request.
            draw: Selects the sample.
        """
        count, size = len(ask.contexts), self._lm.vocab_size
        good = all(len(column) == count for column in drawn)
        good = good and int(drawn.token_ids.min()) >= -1 and int(drawn.token_ids.max()) < size
        expect(good, f"{count} tokens", str(drawn), asked=str(ask))
        for member, context in enumerate(ask.contexts):
            mask = None if masks is None else masks[member if len(masks) > 1 else 0]
            token_id, logprob, log_mass, _ = (column[member].item() for column in drawn)
            may_be_drawn = (
                mask is None or bool(mask[token_id]) if token_id >= 0 else mask is not None
            )
            expect(may_be_drawn, "a token of the mask", token_id, asked=str(ask))
            if draw.random() < self._share:
                found = SampledMember(
                    token_id, logprob, log_mass, mask, context, ask.adapter, str(ask)
                )
                with self._lock:
                    self._members.append(found)

    def compare(self) -> None:
        """Compare the sample with the oracle's rows, while the callers are paused."""
        self._true_rows.clear()
        self._last, self._rows = self._rows, []
        draws, self._draws = self._draws, []
        for found in self._last:
            self._compare(found.row, found, "at that time")
        for ask, drawn in draws:
            self._compare_draws(ask, drawn)
        members, self._members = self._members, []
        for member in members:
            self._compare_member(member)

    def ask_again(self) -> None:
        """Request some rows of the last comparison again, one at a time, and clear it."""
        for found in self._draw.sample(self._last, min(ASKED_AGAIN, len(self._last))):
            with answered(found.asked):
                row = self._lm.next_token_logprobs_sync(found.context, lora_name=found.adapter)
            self._compare(row, found, "asked alone afterwards")
        self._last = []
        self._true_rows.clear()

    def _compare(self, row: torch.Tensor, found: Sampled, when: str) -> None:
        expected = self._true_row(found.context, found.adapter)
        limit = self._target.largest_error
        whose = _row_of(found)
        self.compared += 1
        if largest_difference(row, expected) > limit:
            description = f"{describe_difference(row, expected)}; {when}"
            expect(False, f"{whose} within {limit:g}", description, asked=found.asked)

    def _compare_draws(self, ask: Ask, drawn: Sequence[int]) -> None:
        """Each token is a most likely one, up to rounding."""
        (context,) = ask.contexts
        for position, token in enumerate(drawn):
            row = self._true_row((*context, *drawn[:position]), ask.adapter)
            self.compared += 1
            oracle = DrawOracle(row, self._target.largest_error, temperature=0.0)
            oracle.check(token, None, position=position, asked=str(ask))

    def _compare_member(self, found: SampledMember) -> None:
        """The log-probabilities of the token and of its mask are those of the row."""
        row = self._true_row(found.context, found.adapter)
        allowed = row if found.mask is None else row[found.mask]
        mass = float(allowed.logsumexp(0)) if len(allowed) else -math.inf
        logprob = float(row[found.token_id]) if found.token_id >= 0 else -math.inf
        self.compared += 1
        expected = torch.tensor([logprob, mass])
        given = torch.tensor([found.logprob, found.log_mass]).double()
        expect(
            bool(torch.isclose(given, expected.double(), rtol=0, atol=self._bound).all()),
            f"{expected.tolist()} within {self._bound:g} for token {found.token_id} and its "
            f"mask, from {_row_of(found)}",
            str(given.tolist()),
            asked=found.asked,
        )

    @property
    def _bound(self) -> float:
        return 2 * self._target.largest_error

    def _true_row(self, context: TokenTuple, adapter: str | None) -> torch.Tensor:
        if (context, adapter) not in self._true_rows:
            self._true_rows[context, adapter] = self._oracle_row(context, adapter)
        return self._true_rows[context, adapter]

    def _oracle_row(self, context: TokenTuple, adapter: str | None) -> torch.Tensor:
        oracle = self._target.oracle
        if oracle is None:
            row = self._lm.next_token_logprobs_sync(context, lora_name=adapter)
        else:
            row = torch.as_tensor(oracle(context, adapter))
        return row.detach().cpu().double()


@contextlib.contextmanager
def answered(
    asked: str, *, unless: Callable[[], tuple[type[Exception], ...]] = tuple
) -> Iterator[None]:
    """Raise `CheckFailure` for an error of a request, unless it is a right way to end."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (CheckFailure, *unless())):
            raise
        cause = "" if error.__cause__ is None else f", caused by {error.__cause__!r}"
        raise CheckFailure("an answer", f"{error!r}{cause}", {"asked": asked}) from error


def _row_of(found: Sampled | SampledMember) -> str:
    adapter = f" with adapter {found.adapter!r}" if found.adapter else ""
    return f"the row of {list(found.context)}{adapter}"


def _words(row: object) -> str:
    if isinstance(row, torch.Tensor):
        return f"{row.dtype}, shape {tuple(row.shape)}"
    return repr(row)
