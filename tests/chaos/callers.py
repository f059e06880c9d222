"""`Caller`: event loops on threads, and threads without an event loop, that send requests.

Each runs its plan and counts how its requests end. An answer is checked as soon as it arrives,
before its caller overwrites it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from genlm import (
    AsyncLM,
    Context,
    EngineDiedError,
    EvaluationError,
    Population,
    QueryError,
    QueryResetError,
)
from genlm.testing.check import CheckFailure, expect
from genlm.testing.target import TokenTuple

from .barrier import CallerBarrier
from .comparison import Comparison, answered
from .plan import Ask, Plan, Round, Setting

SCRIBBLE = 7.0

_RESETS = 50

_CONTEXTS = 0.3
"""Share of the sequences that are passed as contexts."""

_REDUCTIONS = 0.3
"""Share of the lone rows that are asked for as the log-probabilities of all tokens."""

_DRAWS = 0.5
"""Share of the populations from which tokens are drawn."""

_KEPT_CONTEXTS = 20
"""Contexts of a caller that it extends; older ones are dropped."""

_KEPT_POPULATIONS = 3
"""Populations of a caller that it resamples and extends; older ones are dropped."""

_MAX_ADDED = 3
"""Most tokens by which a population is extended at once."""


class Caller:
    """One thread that sends requests.

    Args:
        name: Names it in the plan and in messages.
        lm: The model.
        setting: Parameters of the plan.
        comparison: Checks every answer.
        at_most: Most calls in a round.

    Attributes:
        ended: How many requests ended in which way.
        requests: Requests sent; a batch counts once per sequence.
        counted: Requests for rows that the model must have counted, without invalid ones.
        grouped: Requests that share the evaluation of a population with another one.
        draws: Continuations that were answered.
        may_die: Whether `EngineDiedError` is expected from now on.
        midway: Called once, in the middle of the round after half of the requests.
        open: Unanswered requests.
    """

    def __init__(
        self, name: str, lm: AsyncLM, setting: Setting, comparison: Comparison, at_most: int
    ) -> None:
        self.name = name
        self.lm = lm
        self.ended: Counter[str] = Counter()
        self.requests = self.counted = self.grouped = self.draws = 0
        self.may_die: Callable[[], bool] = lambda: False
        self.midway: Callable[[], None] | None = None
        self.open: dict[object, Ask] = {}
        self.adapters = dict.fromkeys(setting.adapters, "")
        self._setting = setting
        self._comparison = comparison
        self._plan = Plan(setting, name, at_most)
        self._random = setting.random("caller", name)
        self._stop = setting.token_ids[0]
        self._half = 0
        self._contexts: deque[Context] = deque(maxlen=_KEPT_CONTEXTS)
        self._populations: deque[Population] = deque(maxlen=_KEPT_POPULATIONS)

    def run(self, requests: int, marks: int, barrier: CallerBarrier) -> None:
        """Make so many requests, with a rest after each of `marks` parts of them."""
        self._half = requests // 2
        try:
            for mark in range(1, marks + 1):
                while self.requests < requests * mark // marks:
                    self.play(self._plan.next_round())
                    if barrier.failure is not None:
                        return
                if not barrier.rest():
                    return
        except BaseException as failure:  # noqa: BLE001 - the host raises it
            barrier.fail(failure)
        finally:
            self.end()

    def play(self, plan: Round) -> None:
        """Carry out one round."""
        raise NotImplementedError

    def end(self) -> None:
        """Free what the caller holds."""

    @property
    def _is_late(self) -> bool:
        """Whether requests may be reset: before, that would end lost ones too."""
        return self.requests >= self._half

    def disturb(self, plan: Round) -> None:
        """What happens beside the requests."""
        if self.midway is not None and self._is_late:
            midway, self.midway = self.midway, None
            midway()
        lm, prefixes = self.lm, self._setting.keeps_prefixes
        with self._unless_dead():
            match plan.disturbance:
                case "cancel_all" if self._is_late:
                    lm.cancel_all()
                case "clear_output_cache":
                    lm.clear_output_cache()
                case "clear_kv_cache" if prefixes:
                    lm.clear_kv_cache()
                case "pin_prefix" if prefixes:
                    self._keep_prefix(plan.context)
                case "load_lora":
                    for name, path in self.adapters.items():
                        lm.load_lora(path, name)
                case "statistics":
                    lm.statistics()

    def _keep_prefix(self, context: Any) -> None:
        try:
            self.lm.pin_prefix(context)
        except EvaluationError as error:
            if "pinned" not in str(error):
                raise
            self.lm.clear_kv_cache()  # those that are pinned fill a small cache

    def check_rows(self, rows: Any, ask: Ask) -> None:
        """Look at each row, then overwrite them if the plan says so."""
        several = ask.kind in {"batch", "population", "sync"}
        expect(not several or len(rows) == len(ask.contexts), "a row each", len(rows))
        for row, context in zip(rows if several else [rows], ask.contexts, strict=True):
            self._comparison.look(row, context, ask, self._random)
        if ask.scribbles:
            rows.fill_(SCRIBBLE)
        self.ended["answered"] += len(ask.contexts)

    def check_draws(self, drawn: Any, ask: Ask) -> None:
        """Look at a continuation."""
        self._comparison.look_at_draws(drawn, ask, self._stop, self._random)
        self.draws += 1
        self.ended["answered"] += 1

    def masks(self, members: int) -> torch.Tensor | None:
        """Masks of draws: none, one for all members, or one for each; a mask may be empty."""
        size = self.lm.vocab_size
        count = self._random.choice([0, 1, members])
        if not count:
            return None
        flags = [self._random.random() < self._random.random() for _ in range(count * size)]
        return torch.tensor(flags).reshape(count, size)

    def check_members(self, drawn: Any, masks: torch.Tensor | None, ask: Ask) -> None:
        """Look at the token drawn for each member of a population."""
        self._comparison.look_at_members(drawn, masks, ask, self._random)
        self.ended["answered"] += len(ask.contexts)

    @contextlib.contextmanager
    def asking(self, ask: Ask) -> Iterator[list[Any]]:
        """Count how a request ends; gives its sequences in the form of the plan."""
        size, request = len(ask.contexts), object()
        self.open[request] = ask
        if ask.kind == "population":  # equal members are one request
            self.counted += len(set(ask.contexts))
            self.grouped += len(set(ask.contexts)) - 1
        elif ask.kind not in {"sample", "wrong"}:
            self.counted += size
        try:
            with answered(str(ask), unless=lambda: self._right_errors(ask)):
                yield [self._spelled(context, ask) for context in ask.contexts]
            expect(ask.kind != "wrong", "QueryError", "an answer", asked=str(ask))
        except QueryError:
            self.ended["refused"] += size
        except QueryResetError:
            self.ended["reset"] += size
        except self._deadly():
            self.ended["died"] += size
        except asyncio.CancelledError:
            self.ended["cancelled"] += size
            raise
        finally:
            del self.open[request]

    def reduces(self, ask: Ask) -> bool:
        """Whether a lone row is asked for as a reduction."""
        return ask.kind != "wrong" and self._random.random() < _REDUCTIONS

    def _spelled(self, token_ids: TokenTuple, ask: Ask) -> object:
        """Ids in the form of the plan, or as a context that extends one of the last ones."""
        if ask.kind == "wrong" or self._random.random() > _CONTEXTS:
            return ask.form(token_ids)
        found = self.lm.context(token_ids[:1], lora_name=ask.adapter)
        for known in self._contexts:
            begins = token_ids[: len(known)] == known.token_ids
            if begins and known.lora_name == found.lora_name and len(known) > len(found):
                found = known
        found = found.extend(token_ids[len(found) :])
        self._contexts.append(found)
        return found

    def population(self, ask: Ask, ids: list[Any]) -> Population:
        """A population of the sequences, which extends one of the last ones if possible.

        Sequences that it does not have are concatenated.
        """
        best: list[tuple[int, tuple[int, ...]] | None] = [None] * len(ids)
        base = None
        for known in self._populations:
            if known.lora_name != self.lm.with_lora(ask.adapter).lora_name:
                continue
            places = {context.token_ids: place for place, context in enumerate(known)}
            found = [
                next(
                    (
                        (places[token_ids[:end]], token_ids[end:])
                        for end in range(len(token_ids), len(token_ids) - _MAX_ADDED - 1, -1)
                        if token_ids[:end] in places
                    ),
                    None,
                )
                for token_ids in ask.contexts
            ]
            if found.count(None) < best.count(None):
                base, best = known, found
        pairs = [pair for pair in best if pair is not None]
        new = [sequence for sequence, pair in zip(ids, best, strict=True) if pair is None]
        parts = []
        if base is not None:
            ancestors, added = zip(*pairs, strict=True)
            width = max(map(len, added))
            columns = [[*more, *[-1] * (width - len(more))] for more in added]
            extended = base[list(ancestors)]
            parts = [extended.extend(np.array(columns)) if width else extended]
        if new:
            parts.append(self.lm.population(new, lora_name=ask.adapter))
        order = np.argsort([pair is None for pair in best], kind="stable")
        population = Population.cat(parts)[np.argsort(order)]
        self._populations.append(population)
        return population

    def _right_errors(self, ask: Ask) -> tuple[type[Exception], ...]:
        refusal = (QueryError,) if ask.kind == "wrong" else ()
        return (QueryResetError, *refusal, *self._deadly())

    @contextlib.contextmanager
    def _unless_dead(self) -> Iterator[None]:
        """Ignore that the engine has died, also if another caller killed it in the meantime."""
        try:
            yield
        except EngineDiedError:
            if not self.may_die():
                raise

    def _deadly(self) -> tuple[type[Exception], ...]:
        return (EngineDiedError,) if self.may_die() else ()

    def sampling(self, ask: Ask) -> dict[str, Any]:
        """Arguments of `sample`."""
        return {
            "max_tokens": ask.max_tokens,
            "stop": [self._stop],
            "temperature": ask.temperature,
            "seed": ask.max_tokens,
            "lora_name": ask.adapter,
        }


class LoopCaller(Caller):
    """Sends concurrent requests on an event loop, which is replaced now and then."""

    _runner: asyncio.Runner | None = None

    def play(self, plan: Round) -> None:
        """Carry out one round; what is left behind ends with the loop."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._runner.get_loop().set_exception_handler(self._complain)
        self.requests += sum(len(ask.contexts) for ask in plan.asks)
        self._runner.run(self._round(plan))
        if self._complaint is not None:
            raise CheckFailure("an event loop without complaints", self._complaint, {})
        if plan.new_loop:
            self.end()

    def end(self) -> None:
        """Close the event loop."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    async def _round(self, plan: Round) -> None:
        asks = list(plan.asks)
        tasks = [asyncio.ensure_future(self._ended(ask)) for ask in asks]
        for _ in range(plan.turns):
            await asyncio.sleep(0)
        self.disturb(plan)
        if self._is_late:
            await self._reset_until_seen(plan)
        for task, ask in zip(tasks, asks, strict=True):
            if ask.ending == "cancel":
                for _ in range(int(ask.after)):
                    await asyncio.sleep(0)
                task.cancel()
        awaited = zip(tasks, asks, strict=True)
        ends = [task for task, ask in awaited if ask.ending != "leave"]
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, Exception):
                raise end

    async def _reset_until_seen(self, plan: Round) -> None:
        """Reset again until one request of the run has ended by it: an engine may be faster."""
        for _ in range(_RESETS):
            if self.ended["reset"]:
                return
            self.requests += 1
            task = asyncio.ensure_future(self._ended(Ask("uncached", (plan.context,))))
            await asyncio.sleep(0)
            with self._unless_dead():
                self.lm.cancel_all()
            await task

    async def _ended(self, ask: Ask) -> None:
        if ask.ending != "time out":
            await self._asked(ask)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._asked(ask), ask.after)

    async def _asked(self, ask: Ask) -> None:
        with self.asking(ask) as ids:
            lm, lora = self.lm, {"lora_name": ask.adapter}
            match ask.kind:
                case "sample":
                    self.check_draws(await lm.sample(ids[0], **self.sampling(ask)), ask)
                case "batch":
                    self.check_rows(await lm.batch_next_token_logprobs(ids, **lora), ask)
                case "population":
                    population = self.population(ask, ids)
                    if self._random.random() < _DRAWS:
                        masks = self.masks(len(population))
                        drawn = await population.draw(masks, seed=ask.max_tokens)
                        self.check_members(drawn, masks, ask)
                    else:
                        self.check_rows(await population.next_token_logprobs(), ask)
                case "sync":  # blocks this loop
                    self.check_rows(lm.batch_next_token_logprobs_sync(ids, **lora), ask)
                case "uncached":
                    row = await lm.next_token_logprobs(ids[0], use_cache=False, **lora)
                    self.check_rows(row, ask)
                case _ if self.reduces(ask):
                    every = range(lm.vocab_size)
                    self.check_rows(await lm.token_logprobs(ids[0], every, **lora), ask)
                case _:
                    adapted = lm.with_lora(ask.adapter)
                    self.check_rows(await adapted.next_token_logprobs(ids[0]), ask)

    _complaint: str | None = None

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._complaint = f"{context['message']}: {_words(context.get('exception'))}"


class ThreadCaller(Caller):
    """Sends one request after another and waits for each."""

    def play(self, plan: Round) -> None:
        """Carry out one round."""
        for position, ask in enumerate(plan.asks):
            if position == plan.turns:
                self.disturb(plan)
            self.requests += len(ask.contexts)
            with self.asking(ask) as ids:
                self._ask(ask, ids)

    def _ask(self, ask: Ask, ids: list[Any]) -> None:
        lora = {"lora_name": ask.adapter}
        if ask.kind == "sample":
            self.check_draws(asyncio.run(self.lm.sample(ids[0], **self.sampling(ask))), ask)
        elif ask.kind == "population":
            self.check_rows(self.population(ask, ids).next_token_logprobs_sync(), ask)
        elif ask.kind in {"batch", "sync"}:
            self.check_rows(self.lm.batch_next_token_logprobs_sync(ids, **lora), ask)
        elif self.reduces(ask):
            every = range(self.lm.vocab_size)
            self.check_rows(self.lm.token_logprobs_sync(ids[0], every, **lora), ask)
        else:
            self.check_rows(self.lm.next_token_logprobs_sync(ids[0], **lora), ask)


def _words(error: BaseException | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {error}"
