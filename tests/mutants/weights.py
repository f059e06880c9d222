"""Faults of engines and of the core that use earlier weights."""

from __future__ import annotations

import numpy as np
import torch

from genlm.core.model.cached_results import CachedResults
from genlm.core.queries.query import GroupValues

from .attention import base_model
from .baselines import cached_target
from .cached_engine import CachedEngine
from .mutant import core_mutant, engine_mutant
from .resident_engine import ResidentEngine


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


@engine_mutant(killed_by="new-weights-are-used")
class KeepsGenerations(CachedEngine):
    """Keeps the logits of populations that the earlier weights computed."""

    def evaluate_groups(self, parts):
        values = []
        for group, places in parts:
            generation = group.generation
            if generation.state is None:
                generation.keep({})
            for place in group.wanted[places].tolist():
                if place not in generation.state:
                    token_ids = generation.lineage.sequence(place).token_ids
                    generation.state[place] = self.logits(token_ids, group.adapter)
                values.append(generation.state[place])
        return GroupValues(torch.from_numpy(np.stack(values)), are_logits=True)


@engine_mutant(killed_by="new-weights-are-used")
class KeepsContexts(ResidentEngine):
    """Keeps the states of contexts that the earlier weights computed."""

    def update_weights(self, weights):
        residents = dict(self.residents)
        super().update_weights(weights)
        self.residents.update(residents)


@engine_mutant(killed_by="new-weights-are-used", shows_as="exception")
class StateDroppedWithNewWeightsOnly(CachedEngine):
    """Raises if it is told that the weights have been changed."""

    def update_weights(self, weights):
        if weights is None:
            raise TypeError("no weights")
        super().update_weights(weights)


@engine_mutant(killed_by="new-weights-are-used")
class WeightsOfTheCaller(CachedEngine):
    """Uses the caller's tensors instead of copies."""

    seed = torch.tensor(0)

    def update_weights(self, weights):
        super().update_weights(weights)
        if weights is not None:
            self.seed = weights["seed"]

    def model(self, adapter):
        if adapter is None:
            return base_model(int(self.seed))
        return super().model(adapter)


@core_mutant(CachedResults, "drop", killed_by="new-weights-are-used", on=cached_target)
def keeps_cached_results(_drop):
    """The output cache keeps the results of the earlier weights."""
    return lambda *_: None
