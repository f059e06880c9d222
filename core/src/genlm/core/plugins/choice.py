"""Which backend is meant when a call names none: `use_backend` and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from genlm.core.plugins.spec import Kind

__all__ = ["chosen", "use_backend"]

_CHOSEN: dict[Kind, ContextVar[str | None]] = {
    "engine": ContextVar("genlm_engine", default=None),
    "trie": ContextVar("genlm_trie", default=None),
}
_VARIABLES: dict[Kind, str] = {"engine": "GENLM_BACKEND", "trie": "GENLM_TRIE"}


@contextmanager
def use_backend(name: str | None = None, *, trie: str | None = None) -> Iterator[None]:
    """Choose the engine, the trie or both for the calls inside a `with` block.

        with genlm.use_backend("hf"):
            llm = genlm.load_model("demo")

    The choice holds for this thread and asyncio task, and for the tasks and
    `asyncio.to_thread` calls that they start inside the block. A plain
    `threading.Thread` starts without it. Blocks nest; an argument of a call wins.
    Names are looked up when a backend is asked for, not here.

    Args:
        name: An engine's name, or `"distribution:name"`; None leaves it as it is.
        trie: The same for the token trie.

    Raises:
        TypeError: Neither is given, or one is not a string.
    """
    choices: dict[Kind, str | None] = {"engine": name, "trie": trie}
    wanted = {kind: choice for kind, choice in choices.items() if choice is not None}
    if not wanted:
        raise TypeError('use_backend needs an engine\'s name, trie="name", or both')
    for choice in wanted.values():
        if not isinstance(choice, str):
            raise TypeError(f"a backend's name is a string; found {choice!r}")
    tokens = [(_CHOSEN[kind], _CHOSEN[kind].set(choice)) for kind, choice in wanted.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def chosen(kind: Kind) -> tuple[str, str] | None:
    """The name chosen by a `use_backend` block or else by the environment.

    Returns:
        The name and where it comes from; None where nothing was chosen.
    """
    name = _CHOSEN[kind].get()
    if name is not None:
        return name, "use_backend"
    variable = _VARIABLES[kind]
    name = os.environ.get(variable, "").strip()
    return (name, variable) if name else None
