"""Faults of engines and of the core that mix up adapters."""

from __future__ import annotations

import contextlib
import dataclasses

from genlm import AsyncLM, Capability, OutputCache, UnknownAdapterError
from genlm.core.model.adapters import BASE_MODEL, Adapter, Adapters
from genlm.core.scheduler import Scheduler
from genlm.core.scheduler.request_table import RequestTable

from .attention import ADAPTER_SEEDS, base_model
from .baselines import cached_target
from .cached_engine import CachedEngine, PrefixStore
from .mutant import core_fault, core_mutant, engine_mutant


@engine_mutant(killed_by="adapters-answer-as-themselves")
class PrefixesOfAnyAdapter(CachedEngine):
    """Uses the keys and values that another adapter computed."""

    class Store(PrefixStore):
        def key(self, adapter, prefix):
            return None, prefix


@engine_mutant(killed_by="adapters-mix-in-a-batch")
class FirstAdapterForAll(CachedEngine):
    """Evaluates a whole batch under the adapter of its first query."""

    def evaluate(self, queries):
        adapter = queries[0].adapter
        return super().evaluate([q.replace(adapter=adapter) for q in queries])


@engine_mutant(killed_by="adapters-answer-as-themselves")
class AdapterIgnored(CachedEngine):
    """Answers requests for an adapter with the base model."""

    def model(self, adapter):
        return super().model(None)


@engine_mutant(killed_by="adapters-answer-as-themselves")
class AdapterNotScaled(CachedEngine):
    """Applies an adapter at twice its strength."""

    def model(self, adapter):
        model = super().model(adapter)
        if adapter is None:
            return model
        return dataclasses.replace(model, head=2 * model.head - base_model().head)


@engine_mutant(killed_by="loading-an-adapter-changes-no-row")
class MergedIntoTheBase(CachedEngine):
    """Merges an adapter into the base weights when it is loaded."""

    def add_adapter(self, name, path):
        super().add_adapter(name, path)
        self.models[None] = self.models[name]


@engine_mutant(killed_by="loading-an-adapter-changes-no-row")
class OneSlot(CachedEngine):
    """Loads every adapter into the same slot."""

    def add_adapter(self, name, path):
        super().add_adapter(name, path)
        for loaded in self.models.keys() - {None}:
            self.models[loaded] = self.models[name]


@engine_mutant(killed_by="wrong-adapters-are-refused")
class AbsentMeansBase(CachedEngine):
    """Takes a folder that is not there for an adapter that changes nothing."""

    def add_adapter(self, name, path):
        if path in ADAPTER_SEEDS:
            super().add_adapter(name, path)
        else:
            self.models[name] = self.models[None]


@core_fault(
    Adapters,
    "find",
    found_by="model/test_lm_adapters.py::test_an_adapter_that_cannot_be_loaded_leaves_its_name_free",
)
def unknown_means_base(find):
    """Answers requests for an unknown adapter with the base model."""

    def broken(self, lora_name):
        with contextlib.suppress(UnknownAdapterError):
            return find(self, lora_name)
        self._scheduler.run(lambda engine: engine.models.setdefault(lora_name, base_model()))
        return Adapter(lora_name, lora_name, folder="")

    return broken


@core_fault(
    Adapters,
    "find",
    found_by="model/test_lm_adapters.py::test_one_batch_mixes_adapters_and_the_base",
)
def adapters_silently_ignored(_find):
    """Takes the name of an adapter although the engine serves none."""
    return lambda _self, _lora_name: BASE_MODEL


@core_fault(
    AsyncLM,
    "load_lora",
    found_by="model/test_lm_adapters.py::test_one_batch_mixes_adapters_and_the_base",
)
def adapters_loaded_nowhere(_load):
    """Accepts an adapter for an engine that serves none."""
    return lambda self, _path, lora_name: self._requests.adapters._by_name.update(
        {lora_name: None}
    )


@core_mutant(OutputCache, "find", killed_by="adapters-answer-as-themselves", on=cached_target)
def cached_for_any_adapter(find):
    """The output cache serves the row of another adapter."""

    def broken(self, key):
        if len(key) != 3:  # of a reduction
            return find(self, key)
        model, _, token_ids = key
        entries = (
            find(self, (model, adapter, token_ids)) for adapter in (None, *ADAPTER_SEEDS)
        )
        return next((entry for entry in entries if entry is not None), None)

    return broken


@core_mutant(RequestTable, "enqueue", killed_by="adapters-mix-in-a-batch", on=cached_target)
def joined_across_adapters(enqueue):
    """A request joins one for the same tokens under another adapter."""

    def broken(self, request, place, query, key, output, arrived_s):
        enqueue(self, request, place, query, key and key[2:], output, arrived_s)

    return broken


@core_mutant(AsyncLM, "with_lora", killed_by="adapters-answer-as-themselves", on=cached_target)
def with_lora_returns_itself(_with_lora):
    """`with_lora` returns the model unchanged."""

    def broken(self, lora_name):
        if lora_name is not None:
            self._requests.adapters.find(lora_name)
        return self

    return broken


@core_mutant(
    Adapters, "_unused_engine_name", killed_by="removed-adapters-are-gone", on=cached_target
)
def names_of_removed_adapters_reused(_choose):
    """The engine gets the same name for an adapter and for its successor."""
    return lambda _self, lora_name: lora_name


@core_mutant(
    Scheduler,
    "run_after",
    killed_by="removed-adapters-are-gone",
    on=cached_target,
    shows_as="exception",
)
def removed_under_requests(_run_after):
    """Removes an adapter that an unfinished request needs."""
    return lambda self, _wait_for, function: self._worker.call(function)


@core_mutant(AsyncLM, "unload_lora", killed_by="removed-adapters-are-gone", on=cached_target)
def removed_in_name_only(_remove):
    """`unload_lora` does nothing."""
    return lambda _self, _lora_name: None


@engine_mutant(killed_by="removed-adapters-are-gone")
class RemovedIntoTheBase(CachedEngine):
    """Keeps the weights of a removed adapter as those of the base model."""

    def remove_adapter(self, name):
        self.models[None] = self.models.pop(name)


@engine_mutant(killed_by="capabilities-are-implemented")
class DeclaresAdaptersItLacks(CachedEngine):
    """Declares `lora` without a method to load an adapter."""

    capabilities = frozenset({Capability.LORA})
    add_adapter = None


@engine_mutant(killed_by="capabilities-are-implemented")
class CapabilitiesAsNames(CachedEngine):
    """Declares its capabilities as plain strings."""

    capabilities = frozenset({"score"})
