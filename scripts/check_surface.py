"""Compare the public names with those of the last release: `make surface`.

A program that ran with the last release must run with this one until the major version
changes. griffe reads the sources, of the newest tag `v*` and of the working tree, without
importing them, and lists removed names and parameters and changed defaults. Before the first
release there is nothing to compare with, and the script says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {
    "core/src": (
        *("genlm", "genlm.constraints", "genlm.plugin", "genlm.prefix", "genlm.smc"),
        "genlm.testing",
    ),
    "plugins/genlm-backend/src": ("genlm.backend",),
    "plugins/genlm-hf/src": ("genlm_hf.engine",),
    "plugins/genlm-llamacpp/src": ("genlm_llamacpp.engine",),
    "plugins/genlm-mlx/src": ("genlm_mlx.engine",),
    "plugins/genlm-ray/src": ("genlm_ray.engine",),
    "plugins/genlm-sgl/src": ("genlm_sgl.engine",),
    "plugins/genlm-trie-cuda/src": ("genlm_trie_cuda.trie",),
    "plugins/genlm-vllm/src": ("genlm_vllm.engine",),
}
"""Source folders and their public modules; options of an engine are those of its class."""


def last_release(repository: Path, new: str = "") -> str | None:
    """The newest tag `v*` of the working tree's history but `new`, None if there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    command += ["--exclude", new] if new else []
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def surface(
    repository: Path, tag: str | None, folder: str, modules: Iterable[str]
) -> griffe.Object | None:
    """A package as of a tag, or of the working tree, with only these modules public."""
    public = set(modules)
    [name] = {module.partition(".")[0] for module in public}
    try:
        if tag is None:
            found = griffe.load(
                name, search_paths=[repository / folder], allow_inspection=False
            )
        else:
            found = griffe.load_git(
                name,
                ref=tag,
                repo=repository,
                search_paths=[folder],
                allow_inspection=False,
            )
    except (ImportError, FileNotFoundError):  # a package that the release did not have
        return None
    assert isinstance(found, griffe.Module)
    for module in _modules(found):
        _mark(module, public)
    return found


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for inner in module.modules.values():
        if not inner.is_alias:
            yield from _modules(inner)


def _mark(module: griffe.Module, public: set[str]) -> None:
    """Make a module public, or what leads to one; lazy modules list names for type checkers."""
    module.public = any(
        name == module.path or name.startswith(f"{module.path}.") for name in public
    )
    if module.path not in public:
        for member in module.members.values():
            if not isinstance(member, griffe.Module):
                member.public = False
    elif not module.exports:
        aliases = (each for each in module.members.values() if isinstance(each, griffe.Alias))
        module.exports = {
            each.name for each in aliases if each.target_path.startswith(f"{_top(module)}.")
        }


def _top(module: griffe.Module) -> str:
    return module.path.partition(".")[0]


def breakages(repository: Path, tag: str, packages: dict[str, tuple[str, ...]]) -> list[str]:
    """What a program that ran with a release can no longer do, one line each."""
    found: list[str] = []
    for folder, modules in packages.items():
        old = surface(repository, tag, folder, modules)
        new = surface(repository, None, folder, modules)
        if old is None:
            continue
        if new is None:
            found.append(f"{folder}: the package was removed")
            continue
        for each in griffe.find_breaking_changes(old, new):
            line = each.explain(griffe.ExplanationStyle.ONE_LINE)
            found.append(re.sub(r"\x1b\[\d+m", "", line))
    return found


def version(repository: Path) -> str:
    """The version in the working tree."""
    text = (repository / "core" / "pyproject.toml").read_text("utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def main() -> int:
    """Print the comparison; 1 if the major version should have changed."""
    tag = last_release(REPOSITORY, os.environ.get("TAG", ""))  # set when it is published
    if tag is None:
        print("no release yet (no tag v*): nothing to compare the public names with")
        return 0
    found, now = breakages(REPOSITORY, tag, PACKAGES), version(REPOSITORY)
    print(f"{len(found)} breaking changes between {tag} and {now}", *found, sep="\n")
    same_major = tag.removeprefix("v").partition(".")[0] == now.partition(".")[0]
    return int(bool(found) and same_major)


if __name__ == "__main__":
    sys.exit(main())
