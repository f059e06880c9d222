"""Which plugins are installed, read from metadata alone.

Nothing here imports a plugin. A plugin is one entry point of the group `genlm`
in one distribution.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from genlm.core.plugins.hookspecs import PROJECT

__all__ = ["CORE", "Plugin", "find_plugins", "normalized", "why_disabled"]

CORE = "genlm-core"
"""The distribution whose own backends are always installed."""

_log = logging.getLogger("genlm.plugins")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of one distribution.

    Attributes:
        name: The entry point's name, which is the backend's.
        distribution: Normalised name of the distribution that declares it.
        version: The distribution's version.
        entry_point: The entry point itself.
    """

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def id(self) -> str:
        """`"distribution:name"`, unique; settles which of several is meant."""
        return f"{self.distribution}:{self.name}"


def normalized(distribution: str) -> str:
    """Spell a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def find_plugins() -> tuple[Plugin, ...]:
    """List the installed plugins, by name and distribution.

    A distribution that is seen several times on `sys.path` (an editable
    installation beside a leftover folder of metadata, a path listed twice)
    counts once: the first one found is the one that `import` would serve.
    Metadata that cannot be read is logged and left out.
    """
    found: dict[tuple[str, str], Plugin] = {}
    for distribution in _declaring_distributions():
        name = normalized(distribution.metadata["Name"])
        for entry_point in distribution.entry_points.select(group=PROJECT):
            plugin = Plugin(entry_point.name, name, distribution.version, entry_point)
            found.setdefault((plugin.name, plugin.distribution), plugin)
    return tuple(found[key] for key in sorted(found))


def _declaring_distributions() -> Iterator[importlib.metadata.Distribution]:
    """Yield each installed distribution that declares plugins, some more than once."""
    for candidate in importlib.metadata.distributions():
        try:
            # Parsing metadata is slow (torch's is long), so look at the text first.
            if f"[{PROJECT}]" not in (candidate.read_text("entry_points.txt") or ""):
                continue
            first = importlib.metadata.distribution(candidate.metadata["Name"])
            first.entry_points.select(group=PROJECT)
            first.metadata["Version"].strip()
        except Exception as error:  # noqa: BLE001 - somebody else's broken metadata
            _log.warning("cannot read the metadata of %s: %r", candidate, error)
            continue
        yield first


def why_disabled(plugin: Plugin, environment: Mapping[str, str] = os.environ) -> str | None:
    """Say which environment variable switches a plugin off, None if none does.

    `GENLM_PLUGINS` lists the plugins allowed beside the core's own,
    `GENLM_DISABLE_PLUGINS` those that are not. Entries are separated by commas
    and are names of backends, of distributions, or `distribution:name`.
    """
    if _lists(environment.get("GENLM_DISABLE_PLUGINS", ""), plugin):
        return "GENLM_DISABLE_PLUGINS lists it"
    allowed = environment.get("GENLM_PLUGINS", "")
    if allowed.strip() and plugin.distribution != CORE and not _lists(allowed, plugin):
        return "GENLM_PLUGINS does not list it"
    return None


def _lists(value: str, plugin: Plugin) -> bool:
    for entry in value.split(","):
        distribution, colon, name = entry.strip().rpartition(":")
        if colon:
            if (normalized(distribution), name) == (plugin.distribution, plugin.name):
                return True
        elif name == plugin.name or (name and normalized(name) == plugin.distribution):
            return True
    return False
