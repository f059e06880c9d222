"""The target of the reference engine: its oracle is the n-gram formula, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genlm import get_backend
from genlm.testing.target import EngineTarget

__all__ = ["targets"]

ORDER = 6
ALPHABET = (0, 97, 98, 256)
"""So few that the text has nearly every history of five, and each changes the row."""

MAX_CONTEXT = 12


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield the reference engine on a text that its oracle can scan quickly.

    Args:
        folder: Where the adapters' texts are put.
    """
    engine = get_backend("reference")
    adapters = {
        name: _adapter(folder / name, seed) for seed, name in enumerate(("red", "blue"))
    }
    build = functools.partial(engine, text=_text(seed=2), order=ORDER, max_context=MAX_CONTEXT)
    yield EngineTarget(
        model=f"{ORDER}-gram",
        build=build,
        oracle=_exact(build, adapters),
        adapters=adapters,
        token_ids=ALPHABET,
        max_length=MAX_CONTEXT,
        tolerance=1e-5,  # the arithmetic is float64 until the end
    )


def _text(seed: int) -> bytes:
    """Forty documents of a hundred symbols, of uneven frequency."""
    symbols = np.random.default_rng(seed).choice(ALPHABET[:3], (40, 100), p=(0.2, 0.3, 0.5))
    return b"\n\n".join(bytes(document.tolist()) for document in symbols)


def _adapter(folder: Path, seed: int) -> str:
    folder.mkdir(parents=True)
    (folder / "text.txt").write_bytes(_text(seed))
    return str(folder)


def _exact(
    build: Callable[[], Any], adapters: dict[str, str]
) -> Callable[[tuple[int, ...], str | None], Any]:
    """The formula by scanning the text, which shares no code with `evaluate`."""
    engine = build()
    for name, path in adapters.items():
        engine.add_adapter(name, path)

    @functools.cache
    def row(tail: tuple[int, ...], adapter: str | None) -> Any:
        return np.log(engine.exact_row(tail, adapter))

    # Older tokens do not matter to an n-gram model, by definition.
    return lambda token_ids, adapter: row(token_ids[1 - ORDER :], adapter)
