"""`genlm plugin new NAME`: create a plugin that passes the conformance suite."""

from __future__ import annotations

import importlib.metadata
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from genlm.core.plugins.lookup import list_backends
from genlm.core.plugins.registry import PUBLISHED

plugin_commands = typer.Typer(name="plugin", help="Create a plugin.", no_args_is_help=True)

_FILES = {
    "pyproject.toml.template": "pyproject.toml",
    "README.md.template": "README.md",
    "plugin.py.template": "src/{package}/plugin.py",
    "engine.py.template": "src/{package}/engine.py",
    "conformance.py.template": "src/{package}/conformance.py",
    "test_conformance.py.template": "tests/test_conformance.py",
    "test_engine.py.template": "tests/test_engine.py",
}
"""Templates and the paths of the files made from them."""

_OTHER_DISTRIBUTIONS = {
    "backend", "bytes", "control", "core", "grammar", "lm-eval", "trie-cuda",
}  # fmt: skip
"""Names of distributions that are not backends, without the prefix genlm-."""


@plugin_commands.callback()
def _commands() -> None:
    """Make `new` a subcommand although it is the only one."""


@plugin_commands.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the backend, as in backend=NAME.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder to create; by default genlm-NAME.")
    ] = None,
) -> None:
    """Create a package with a small engine, its tests and its metadata.

    A plugin with a token trie has the same files: a spec with kind="trie", a class derived from
    TokenCharacterTrie, and a TrieTarget, as in genlm-trie-cuda.
    """
    _check(name)
    root = Path(f"genlm-{name}") if folder is None else folder
    if root.exists():
        raise typer.BadParameter(f"{root} exists; name another with --folder")
    written = _write(root, name)
    path = root if root.is_absolute() else f"./{root}"
    typer.echo(
        f"wrote {root}. Next:\n"
        f"  pip install -e '{path}[test]'\n"
        f"  genlm check {name}\n"
        f"  genlm demo --backend {name}\n"
        f"then put your model into {written['engine.py.template']}."
    )


def _check(name: str) -> None:
    if re.fullmatch(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", name) is None:
        raise typer.BadParameter(
            f"{name!r}: expected lower-case letters, digits and single '-' or '_', such as "
            f"'mine' or 'my-engine'; genlm- is added to the name of the distribution"
        )
    taken = {info.name: info.distribution for info in list_backends()}
    taken |= {published: distribution for published, (_, distribution) in PUBLISHED.items()}
    taken |= {other: f"genlm-{other}" for other in _OTHER_DISTRIBUTIONS}
    # "_" and "-" are equal in names of distributions.
    holder = taken.get(name) or taken.get(name.replace("_", "-"))
    if holder is not None:
        raise typer.BadParameter(f"{name!r} is taken by {holder}; choose another name")


def _write(root: Path, name: str) -> dict[str, Path]:
    """Write the files; return their paths by template."""
    package = f"genlm_{name.replace('-', '_')}"
    words = {
        "name": name,
        "package": package,
        "distribution": f"genlm-{name}",
        "engine": "".join(word.capitalize() for word in re.split("[-_]", name)) + "Engine",
        "version": importlib.metadata.version("genlm-core"),
    }
    texts = {
        root / "src" / package / "__init__.py": f'"""The engine {name} for genlm."""\n',
        root / "src" / package / "py.typed": "",
    }
    written = {}
    for template, target in _FILES.items():
        source = resources.files("genlm.cli") / "plugin_template" / template
        path = written[template] = root / target.format(package=package)
        texts[path] = Template(source.read_text("utf-8")).substitute(words)
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    return written
