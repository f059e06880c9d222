"""The conformance target of the scripted engine, for tests of the checks themselves.

Its rows depend on every token, its position and the adapter, so that every fault shows.
"""

from __future__ import annotations

from typing import Any

from scripted import ScriptedEngine, oracle_row

from genlm import AdapterError
from genlm.testing import EngineTarget

VOCAB_SIZE = 16
MAX_CONTEXT = 12
ADAPTERS = {"red": "folder/red", "blue": "folder/blue"}


class CertifiedEngine(ScriptedEngine):
    """A `ScriptedEngine` of the target's size that refuses adapters it does not know."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, max_context=MAX_CONTEXT)

    def add_adapter(self, name: str, path: str) -> None:
        if path not in ADAPTERS.values():
            raise AdapterError(f"no adapter in {path!r}")
        super().add_adapter(name, path)


def scripted_target(**changes: Any) -> EngineTarget:
    """The target, with other fields as told; broken engines come as `build=`."""
    settings: dict[str, Any] = {
        "model": "scripted",
        "build": CertifiedEngine,
        "oracle": lambda ids, adapter: oracle_row(ids, adapter, VOCAB_SIZE),
        "adapters": ADAPTERS,
        "max_length": MAX_CONTEXT,
        "texts": (),
        "tight_options": [{}],
        "timeout_s": 60.0,
    }
    return EngineTarget(**(settings | changes))
