"""Conformance targets of the core's backends: the reference engine and the numpy trie."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genlm import get_backend, get_trie
from genlm.testing.target import EngineTarget, Oracle, TokenTuple, TrieTarget

ORDER = 6
ALPHABET = (0, 97, 98, 256)
"""So small that the text contains nearly every history of five, and each changes the row."""

MAX_CONTEXT = 12


def reference_targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield the reference engine on a text that its oracle scans quickly.

    The oracle is the n-gram formula in float64, computed by scanning the text; it shares no
    code with `evaluate`.

    Args:
        folder: Folder for the adapters' texts.
    """
    engine = get_backend("reference")
    adapters = {
        name: _write_adapter(folder / name, seed) for seed, name in enumerate(("red", "blue"))
    }
    build = functools.partial(engine, text=_text(seed=2), order=ORDER, max_context=MAX_CONTEXT)
    yield EngineTarget(
        model=f"{ORDER}-gram",
        build=build,
        oracle=_exact_oracle(build, adapters),
        adapters=adapters,
        token_ids=ALPHABET,
        max_length=MAX_CONTEXT,
        tolerance=1e-5,  # the engine computes in float64 and rounds at the end
    )


def numpy_targets(folder: Path) -> Iterator[TrieTarget]:
    """Yield the numpy trie without and, where numba is installed, with compiled code.

    Args:
        folder: Unused.
    """
    del folder
    trie = get_trie("numpy")
    yield TrieTarget(model="numpy", build=functools.partial(trie, compiled=False))
    if importlib.util.find_spec("numba") is not None:
        yield TrieTarget(model="compiled", build=functools.partial(trie, compiled=True))


def _text(seed: int) -> bytes:
    """Forty documents of a hundred symbols, of unequal frequency."""
    symbols = np.random.default_rng(seed).choice(ALPHABET[:3], (40, 100), p=(0.2, 0.3, 0.5))
    return b"\n\n".join(bytes(document.tolist()) for document in symbols)


def _write_adapter(folder: Path, seed: int) -> str:
    folder.mkdir(parents=True)
    (folder / "text.txt").write_bytes(_text(seed))
    return str(folder)


def _exact_oracle(build: Callable[[], Any], adapters: dict[str, str]) -> Oracle:
    engine = build()
    for name, path in adapters.items():
        engine.add_adapter(name, path)

    @functools.cache
    def row(history: TokenTuple, adapter: str | None) -> Any:
        return np.log(engine.exact_row(history, adapter))

    # An n-gram model ignores older tokens, by definition.
    return lambda token_ids, adapter: row(token_ids[1 - ORDER :], adapter)
