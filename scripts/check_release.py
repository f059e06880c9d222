"""Check that a tag can be published: `make release-check TAG=v1.2.3`.

Every distribution must have the tag's version, and the changelog a section for it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def reasons(repository: Path, tag: str) -> Iterator[str]:
    """Why the tag may not be published; nothing if it may."""
    if re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag) is None:
        yield f"{tag!r} is not a tag such as v1.2.3 or v1.2.3rc1"
        return
    wanted = tag.removeprefix("v")
    for folder in (repository / "core", *sorted((repository / "plugins").iterdir())):
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        if project["version"] != wanted:
            yield f"{project['name']} has version {project['version']}, not {wanted}"
    changelog = (repository / "CHANGELOG.md").read_text("utf-8")
    if re.search(rf"^## {re.escape(wanted)}\b", changelog, re.MULTILINE) is None:
        yield f"CHANGELOG.md has no section '## {wanted}'"


def main(arguments: list[str]) -> int:
    """Print the reasons; 1 if there are any."""
    tag = arguments[0] if arguments else ""
    found = list(reasons(REPOSITORY, tag))
    print(*found or [f"{tag} may be published"], sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
