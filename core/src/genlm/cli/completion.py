"""Names of installed backends for the completion of the shell."""

from __future__ import annotations

from collections.abc import Callable

from genlm.core.plugins import list_backends
from genlm.core.plugins.spec import Kind

__all__ = ["backends"]


def backends(kind: Kind | None = None) -> Callable[[str], list[str]]:
    """Return a function that completes the name of a usable engine, trie, or either."""

    def complete(incomplete: str) -> list[str]:
        names = {info.name for info in list_backends(kind) if info.status == "ok"}
        return sorted(name for name in names if name.startswith(incomplete))

    return complete
