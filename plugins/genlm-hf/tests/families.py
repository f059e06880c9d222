"""The families of `genlm.testing` as the tests build them, and the path that serves each."""

from __future__ import annotations

from typing import Any

from architecture_tables import read_table

from genlm.testing import families

from .tiny import llama_settings


def family(model_type: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A model of Llama's settings, changed as told."""
    return model_type, llama_settings(**changes)


TABLE = read_table("hf")
"""What the last run found about each family, by its name."""

FAMILIES = {
    name: (one.model_type, dict(one.settings)) for name, one in families(head_dim=8).items()
}
SERVED = [name for name in FAMILIES if TABLE[name].status == "right"]
