"""Real distributions in temporary folders, written as `pip` would have written them."""

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from genlm.core.plugins.lookup import refresh

HEADER = "import genlm\nfrom genlm import BackendSpec\n"


class Site:
    """A folder on `sys.path` into which distributions are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, module: str, source: str) -> None:
        path = self.folder / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def metadata(
        self, distribution: str, entry_points: dict[str, str], version: str = "1.0"
    ) -> Path:
        """Write a `.dist-info` folder and return it."""
        folder = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[genlm]", *lines]) + "\n")
        refresh()
        return folder

    def install(
        self,
        distribution: str,
        *names: str,
        kind: str = "engine",
        body: str | None = None,
        extra: str = "",
    ) -> str:
        """Install a plugin with one module for all its names; return the module's name.

        Args:
            distribution: The distribution's name.
            names: Entry points, one per name.
            kind: Of each spec.
            body: The module's text after the imports; by default a hook that
                yields one spec per name with `Backend` in the same distribution.
            extra: More arguments of each `BackendSpec`.
        """
        stem = distribution.replace("-", "_").replace(".", "_")
        target = f"{stem}_backend:Backend"
        specs = "".join(
            f"    yield BackendSpec({name!r}, {kind!r}, {target!r}, {extra})\n"
            for name in names
        )
        hook = f"@genlm.hookimpl\ndef genlm_backends():\n{specs}"
        module = f"{stem}_plugin"
        self.write(module, HEADER + (hook if body is None else textwrap.dedent(body)))
        self.write(f"{stem}_backend", f"class Backend:\n    distribution = {distribution!r}\n")
        self.metadata(distribution, dict.fromkeys(names, module))
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An environment in which `Site.install` alone decides what is installed."""
    for variable in (
        "GENLM_BACKEND",
        "GENLM_TRIE",
        "GENLM_PLUGINS",
        "GENLM_DISABLE_PLUGINS",
        "GENLM_STRICT",
    ):
        monkeypatch.delenv(variable, raising=False)
    modules = set(sys.modules)
    site = Site(tmp_path / "site")
    outside = [entry for entry in sys.path if "site-packages" not in entry]
    # The sources of editable installations carry no metadata; without the
    # site-packages nothing of the real environment is visible.
    monkeypatch.setattr(sys, "path", [str(site.folder), *outside])
    refresh()
    yield site
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    refresh()


@pytest.fixture
def core(site: Site) -> Site:
    """The same with what every real environment has: genlm-core and its engine."""
    site.install("genlm-core", "reference")
    return site
