"""Faults of engines and of the core that use earlier weights."""

from __future__ import annotations

from genlm.core.model import weight_methods

from .baselines import cached_target
from .cached_engine import CachedEngine
from .mutant import core_mutant, engine_mutant


@engine_mutant(killed_by="new-weights-are-used")
class KeepsPrefixes(CachedEngine):
    """Keeps the keys and values that the earlier weights computed."""

    def update_weights(self, weights):
        states, pinned = dict(self.prefixes.states), dict(self.prefixes.pinned)
        super().update_weights(weights)
        self.prefixes.states.update(states)
        self.prefixes.pinned.update(pinned)


@engine_mutant(killed_by="new-weights-are-used")
class KeepsPinnedPrefixes(CachedEngine):
    """Keeps pinned prefixes of the earlier weights."""

    def update_weights(self, weights):
        pinned = dict(self.prefixes.pinned)
        super().update_weights(weights)
        self.prefixes.pinned.update(pinned)


@engine_mutant(killed_by="new-weights-are-used")
class AdaptersOfTheEarlierBase(CachedEngine):
    """Leaves adapters merged into the earlier weights."""

    def update_weights(self, weights):
        adapted = {name: self.models[name] for name in self.adapter_seeds}
        super().update_weights(weights)
        self.models.update(adapted)


@core_mutant(weight_methods, "drop_results", killed_by="new-weights-are-used", on=cached_target)
def keeps_cached_results(_drop_results):
    """The output cache keeps the results of the earlier weights."""
    return lambda *_: None
