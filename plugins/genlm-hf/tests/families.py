"""The families of `genlm.testing` as the tests build them, and the path that serves each."""

from __future__ import annotations

from typing import Any

import transformers
from architecture_tables import read_table
from packaging.version import Version

from genlm.testing import families

from .tiny import llama_settings


def family(model_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A model of Llama's settings, changed as told."""
    return model_type, llama_settings(**changes)


TABLE = read_table("hf")
"""What the last run found about each family, by its name."""

FAMILIES = {
    name: (family.model_type, dict(family.settings))
    for name, family in families(head_dim=8).items()
}

# Later tokens change earlier rows of transformers 5.17's Doge: it is refused there.
_REFUSED = {"doge"} if transformers.__version__.startswith("5.17.") else set()

SERVED = [n for n in FAMILIES if TABLE[n].status == "right" and n not in _REFUSED]

# Since transformers 5.24 their layers use its attention interface.
_PACKED_LATER = {"gptj", "codegen"}


def path_of(name: str) -> str:
    """The execution path that serves a family with the installed transformers."""
    later = Version(transformers.__version__) >= Version("5.24")
    return "packed" if later and name in _PACKED_LATER else TABLE[name].path
