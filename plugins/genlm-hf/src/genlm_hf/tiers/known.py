"""The tier that serves each family of models: `tiers.json`, which is made by a run.

`scripts/architectures.py --backend hf` writes it together with docs/hf-architectures.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from genlm import ModelFacts

__all__ = ["KnownTiers"]

_FASTEST_FIRST = ("packed", "gathered", "padded")


@dataclass(frozen=True)
class KnownTiers:
    """What a run found.

    Attributes:
        versions: Of the libraries with which it was run.
        tiers: By `ModelFacts.key`.
    """

    versions: Mapping[str, str]
    tiers: Mapping[str, str]

    @classmethod
    @functools.cache
    def shipped(cls) -> Self:
        """Read what is part of this package."""
        folder = importlib.resources.files("genlm_hf")
        return cls(**json.loads(folder.joinpath("tiers.json").read_text("utf-8")))

    def tier_of(self, model: Any) -> str | None:
        """Return the tier of a model's family, None if it is not known."""
        config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        return self.tiers.get(ModelFacts.of(config).key)

    def faster(self, model: Any, tier: str) -> str | None:
        """Say which faster tier served the family, with which versions; None if none did."""
        known = self.tier_of(model)
        if known is None or _FASTEST_FIRST.index(known) >= _FASTEST_FIRST.index(tier):
            return None
        versions = [
            f"{library} {version} (installed: {importlib.metadata.version(library)})"
            for library, version in self.versions.items()
        ]
        return f"{known!r} with {' and '.join(versions)}"
