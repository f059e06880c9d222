"""The requests of each caller, determined by the seed alone.

Contexts are those of particles: prompts that all callers share, continued token by token,
copied to one another, and continued apart. The ids are few, so that callers meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from genlm.testing.strategies import near_misses
from genlm.testing.target import TokenTuple

AskKind = Literal["row", "uncached", "batch", "population", "sync", "sample", "wrong"]
Ending = Literal["answer", "cancel", "time out", "leave"]
Disturbance = Literal[
    "nothing",
    "cancel_all",
    "clear_output_cache",
    "clear_kv_cache",
    "pin_prefix",
    "load_lora",
    "statistics",
]

FEW_IDS = 4
LARGEST_POPULATION = 24
LARGEST_GROUP = 12  # above the `smallest_group` of the engines
TIME_LIMITS_S = (0.0, 1e-4, 1e-3, 1e-2)

_KINDS: dict[AskKind, int] = {
    "row": 60,
    "uncached": 12,
    "batch": 8,
    "population": 8,
    "sync": 2,
    "sample": 4,
    "wrong": 4,
}
_MANY_POPULATIONS: dict[AskKind, int] = {**_KINDS, "population": 200}
"""For some rounds, in which several populations are computed together."""

_ENDINGS: dict[Ending, int] = {"answer": 85, "cancel": 8, "time out": 6, "leave": 1}
_DISTURBANCES: dict[Disturbance, int] = {
    "nothing": 75,
    "statistics": 8,
    "clear_output_cache": 4,
    "clear_kv_cache": 4,
    "pin_prefix": 4,
    "load_lora": 2,
    "cancel_all": 3,
}


@dataclass(frozen=True)
class Setting:
    """The parameters of a plan.

    Attributes:
        seed: Decides everything.
        token_ids: Ids to build contexts of.
        vocab_size: Number of ids.
        max_length: The longest context to ask for.
        max_context: The longest that the engine takes, None for no limit.
        adapters: Names of the adapters, None of them for the base model.
        keeps_prefixes: Whether the engine takes `pin_prefix`.
    """

    seed: int
    token_ids: Sequence[int]
    vocab_size: int
    max_length: int
    max_context: int | None
    adapters: Sequence[str]
    keeps_prefixes: bool

    def random(self, *salt: object) -> random.Random:
        """A random generator for one purpose."""
        return random.Random(repr((self.seed, *salt)))


@dataclass(frozen=True)
class Ask:
    """One call of the public interface.

    Attributes:
        kind: Which method.
        contexts: One, or several for a batch or a population.
        adapter: For which adapter, None for the base model.
        form: Passes the ids as a list, a tuple, numpy or torch.
        ending: What becomes of the call.
        after: Turns of the event loop before it is cancelled, or seconds.
        scribbles: Whether the caller overwrites the rows that it gets.
        max_tokens: Of a sample.
        temperature: Of a sample.
    """

    kind: AskKind
    contexts: tuple[TokenTuple, ...]
    adapter: str | None = None
    form: Callable[[Sequence[int]], object] = list
    ending: Ending = "answer"
    after: float = 0
    scribbles: bool = False
    max_tokens: int = 0
    temperature: float = 1.0

    def __str__(self) -> str:
        ids = " ".join(str(list(context)) for context in self.contexts)
        whose = f" with adapter {self.adapter!r}" if self.adapter else ""
        ends = "" if self.ending == "answer" else f", to {self.ending} after {self.after:g}"
        return f"{self.kind} of {ids}{whose}{ends}"


@dataclass(frozen=True)
class Round:
    """Calls made together, and what happens beside them.

    Attributes:
        asks: The calls.
        turns: Turns of the event loop before the disturbance.
        disturbance: What happens then.
        context: For `pin_prefix`.
        new_loop: Whether the caller continues on another event loop.
    """

    asks: tuple[Ask, ...]
    turns: int
    disturbance: Disturbance
    context: TokenTuple
    new_loop: bool


class Plan:
    """The rounds of one caller, one after another, without end.

    Args:
        setting: What all callers share.
        caller: Names this one.
        at_most: Most calls in a round.
    """

    def __init__(self, setting: Setting, caller: str, at_most: int) -> None:
        self._setting = setting
        self._random = setting.random("plan", caller)
        self._at_most = at_most
        shared = setting.random("shared")
        ids = list(setting.token_ids)
        self._few = [ids[0], *shared.choices(ids, k=FEW_IDS - 1)]
        longest = max(1, setting.max_length // 2)
        self._prompts = [
            tuple(shared.choices(ids, k=shared.randint(1, longest))) for _ in range(6)
        ]
        self._population: list[TokenTuple] = []

    def next_round(self) -> Round:
        """What the caller does next."""
        draw = self._random
        self._grow()
        kinds = _MANY_POPULATIONS if draw.random() < 0.2 else _KINDS
        asks = tuple(self._ask(context, kinds) for context in self._population)
        return Round(
            asks=asks + tuple(draw.choices(asks, k=draw.randrange(3))),  # duplicates
            turns=draw.randrange(4),
            disturbance=self._chosen(_DISTURBANCES),
            context=draw.choice(self._population),
            new_loop=draw.random() < 0.1 or any(ask.ending == "leave" for ask in asks),
        )

    def _grow(self) -> None:
        """Continue each context by a token; copy some, or start again."""
        draw, longest = self._random, self._setting.max_length
        room = [context for context in self._population if len(context) < longest]
        if not room or draw.random() < 0.05:
            room = [draw.choice(self._prompts)]
        if len(room) < 2 or draw.random() < 0.3:
            room = draw.choices(room, k=draw.randint(1, self._at_most))
        self._population = [(*context, self._token()) for context in room]

    def _token(self) -> int:
        common = self._random.random() < 0.9
        return self._random.choice(self._few if common else self._setting.token_ids)

    def _ask(self, context: TokenTuple, kinds: dict[AskKind, int]) -> Ask:
        draw, setting = self._random, self._setting
        kind = self._chosen(kinds)
        ending = self._chosen(_ENDINGS)
        after = draw.randrange(5) if ending == "cancel" else draw.choice(TIME_LIMITS_S)
        contexts: tuple[TokenTuple, ...] = (self._near_miss(context),)
        form = draw.choice((list, tuple, np.asarray, torch.as_tensor))
        if kind == "wrong":
            contexts, form = (self._wrong(context),), list
        elif kind in {"batch", "sync"}:
            contexts = tuple(draw.choices([context, *self._population], k=draw.randint(1, 5)))
        elif kind == "population":
            size = draw.choice([draw.randint(1, LARGEST_GROUP), LARGEST_GROUP])
            contexts = tuple(draw.choices(self._population, k=size))
        return Ask(
            kind,
            contexts,
            adapter=draw.choice([None, *setting.adapters]),
            form=form,
            ending=ending,
            after=after,
            scribbles=draw.random() < 0.3,
            max_tokens=draw.randint(1, 4),
            temperature=draw.choice((0.0, 0.0, 1.0)),
        )

    def _near_miss(self, context: TokenTuple) -> TokenTuple:
        if self._random.random() > 0.1:
            return context
        misses = near_misses(context).values()
        short = [miss for miss in misses if len(miss) <= self._setting.max_length]
        return self._random.choice([context, *short])

    def _wrong(self, context: TokenTuple) -> TokenTuple:
        """Ids that nothing may evaluate."""
        wrong: list[TokenTuple] = [(), (-1, *context), (*context, self._setting.vocab_size)]
        if self._setting.max_context is not None:
            wrong.append(context[:1] * (self._setting.max_context + 1))
        return self._random.choice(wrong)

    def _chosen(self, weights: dict) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]
