"""The engine protocol: the interface between the scheduler and a plugin.

An engine is built, called and closed on one thread, and is independent of asyncio, output
caching and the number of callers. Plugins that drive the loop of a server (continuous batching)
implement `Engine`; others derive from `BatchEngine` (`batch_engine`) and implement `evaluate`.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

from genlm.core.base.errors import EvaluationError, UnsupportedCapabilityError
from genlm.core.base.validation import checked_integer
from genlm.core.queries.query import Completion, Query
from genlm.core.vocab import Vocabulary

logger = logging.getLogger("genlm")

query_ids = itertools.count(2**48)
"""Ids of queries into which engines divide others, shared by all engines of the process. They
are above the ids of the scheduler's queries."""


class Capability(enum.StrEnum):
    """Optional abilities of an engine beyond next-token rows."""

    LORA = "lora"
    """LoRA adapters per request; the engine is a `LoraEngine`."""

    PREFIX_CACHE = "prefix_cache"
    """Caches computed prefixes; the engine is a `PrefixCacheEngine`."""

    SCORE = "score"
    """Computes queries with `targets`, all positions of a sequence at once."""

    WEIGHTS = "weights"
    """Accepts new weights of the base model; the engine is a `WeightsEngine`."""


@runtime_checkable
class Engine(Protocol):
    """Computes queries, several at a time, in any order.

    An engine may also have `capability_hints`, a mapping from missing capabilities to
    instructions such as `"load the model with enable_lora=True"`.

    An engine whose `step` waits for other processes may also have a method `wake()`, which any
    thread calls when there are new queries, aborts or calls for the engine. It must not block.
    `step` should then return soon, with the completions that are ready, if any.

    An engine that detects changes of its weights has a method `weights_version()`, which
    returns a value that is equal as long as they are unchanged, in any thread. Results of
    earlier weights are then not returned from the output cache. The engine drops its own caches
    in its next step.

    An engine with a method `submit_group(group)` accepts the query of a population as one
    `GroupQuery`, whose result is a `GroupResult`. Engines without this method, or with None in
    its place, receive one query per distinct sequence. Engines with the method also receive
    single queries for groups of one member, and for groups with fewer members than their
    attribute `smallest_group`, by default 2, that are pending together with single queries. An
    engine that forwards queries to other processes may have an attribute
    `samples_groups`, the maximum number of continuations in a query: it then accepts group
    queries with `sampling`. For other engines, the core submits queries for every token. An
    engine with an attribute `scored_columns`, the maximum number of rows of a sequence,
    accepts group queries with `dropped`. On others, scores of populations are those of texts.

    An engine that stores the state of groups apart from that of single sequences may have a
    method `keep_sequences(generation)`, which is called when other requests may extend the
    sequences of a generation. Continuations of several callers that are pending together are
    then drawn as one group.

    Attributes:
        vocabulary: Tokens whose ids are those of queries and the indices of rows.
        max_context: Maximum number of tokens of a query, None for no limit.
        capabilities: Abilities beyond next-token rows.
    """

    vocabulary: Vocabulary
    max_context: int | None
    capabilities: frozenset[Capability]

    def submit(self, query: Query) -> None:
        """Accept a query, or raise to reject it."""
        ...

    def step(self) -> Iterable[Completion]:
        """Make progress on submitted queries and return the completed ones.

        `step` is called only while queries are in flight, again at once if it returns none, so
        it waits for results that others compute. A failed query is returned as a
        `Completion` with an error. An exception means that the engine failed: all in-flight
        queries are then aborted and fail.
        """
        ...

    def abort(self, query_id: int) -> None:
        """Drop a query; a later completion of it is ignored.

        Ids of queries that a step has completed in the meantime must be ignored. An exception
        is logged; the engine continues with its other queries.
        """
        ...

    def close(self) -> None:
        """Free all resources. Called once; only `statistics` may be called afterwards."""
        ...

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts and sizes, including `tokens_computed` if the engine counts tokens.

        Numbers that only grow are objects of `Count`, so that statistics can be subtracted.
        This is the only method that is called from any thread, also while `step` runs and after
        `close`.
        """
        ...


_MEMBERS = (
    *("vocabulary", "max_context", "capabilities"),
    *("submit", "step", "abort", "close", "statistics"),
)


def checked_engine(engine: Engine) -> Engine:
    """Return an engine unchanged; reject an object without the members of `Engine`.

    Raises:
        TypeError: A member is missing or has another type.
        ValueError: `max_context` is below 1.
    """
    missing = [name for name in _MEMBERS if not hasattr(engine, name)]
    if missing:
        raise TypeError(
            f"the function that builds the engine returned {engine!r}, which is not an engine: "
            f"it lacks {', '.join(missing)}; derive engines from genlm.BatchEngine, and set "
            f"their vocabulary"
        )
    if not isinstance(engine.vocabulary, Vocabulary):
        raise TypeError(
            f"the vocabulary of {engine!r} is {type(engine.vocabulary).__name__}; expected a "
            f"genlm.Vocabulary"
        )
    if engine.max_context is not None:
        checked_integer(f"{type(engine).__name__}.max_context", engine.max_context, 1)
    capabilities: object = engine.capabilities
    if not isinstance(capabilities, Set) or not capabilities <= set(Capability):
        raise TypeError(
            f"{type(engine).__name__}.capabilities is {capabilities!r}; expected a frozenset "
            f"of genlm.Capability values, which are {', '.join(Capability)}"
        )
    return engine


def checked_completions(completions: Any) -> list[Completion]:
    """Return what `Engine.step` returned as a list; reject other objects.

    Raises:
        EvaluationError: The step did not return an iterable of `Completion` objects.
    """
    types: set[type] = set()
    if isinstance(completions, Iterable):
        step_completions = list(completions)
        types = {*map(type, step_completions)}
        if all(issubclass(kind, Completion) for kind in types):
            return step_completions
    found = type(completions).__name__
    if types:
        found += f" of {', '.join(sorted(kind.__name__ for kind in types))}"
    raise EvaluationError(
        f"the engine's step returned {found}; expected a list of genlm.Completion objects, "
        f"which is empty if no query is complete"
    )


def require_capability(engine: Engine, capability: Capability, backend: str) -> None:
    """Raise `UnsupportedCapabilityError`, with the engine's hint, if it lacks a capability."""
    if capability not in engine.capabilities:
        hints = getattr(engine, "capability_hints", {})
        raise UnsupportedCapabilityError(capability, backend, hints.get(capability, ""))


def call_each(method: Callable[..., object], calls: Iterable[tuple[Any, ...]]) -> None:
    """Call a method of an engine for each tuple of arguments; log errors and continue."""
    for arguments in calls:
        try:
            method(*arguments)
        except Exception:
            logger.exception("%s of the engine raised", getattr(method, "__name__", method))


@runtime_checkable
class LoraEngine(Engine, Protocol):
    """Additional methods of an engine with `Capability.LORA`.

    The engine may also have `adapters`, the names of preloaded adapters, and a method
    `remove_adapter(name)` that frees an adapter loaded by `add_adapter`. `AsyncLM` calls it
    when no in-flight query uses the adapter, and never reuses the name.
    """

    def add_adapter(self, name: str, path: str) -> None:
        """Load the adapter in folder `path` under the name `name`.

        Raises:
            AdapterError: The adapter cannot be loaded; the engine is unchanged.
        """
        ...


@runtime_checkable
class PrefixCacheEngine(Engine, Protocol):
    """Additional methods of an engine with `Capability.PREFIX_CACHE`."""

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and keep it until `clear_prefix_cache`."""
        ...

    def clear_prefix_cache(self) -> None:
        """Free all cached prefixes. Results do not change."""
        ...


@runtime_checkable
class WeightsEngine(Engine, Protocol):
    """Additional method of an engine with `Capability.WEIGHTS`."""

    def update_weights(self, weights: Mapping[str, Any] | None) -> None:
        """Replace the weights of the base model, and drop all state computed from earlier ones.

        The method is called while no query is unfinished. Contexts, generations and adapters
        remain valid.

        Args:
            weights: All weights by name, which the engine copies; None if the weights have been
                changed and only the state is to be dropped.

        Raises:
            ValueError: The weights do not fit the model; the engine is unchanged.
            Exception: The weights may be partly replaced; the core ends the engine.
        """
        ...
