"""Reading the tables that `scripts/architectures.py` writes to docs/."""

from __future__ import annotations

from typing import NamedTuple

from documents import REPOSITORY


class Row(NamedTuple):
    """The result of a family on an engine."""

    status: str
    path: str
    error: float | None
    bound: float
    note: str


def read_table(backend: str) -> dict[str, Row]:
    """Return the rows of docs/<backend>-architectures.md, by the family's name."""
    rows = {}
    page = REPOSITORY / "docs" / f"{backend}-architectures.md"
    for line in page.read_text("utf-8").splitlines():
        cells = [cell.replace("\\|", "|") for cell in line[2:-2].split(" | ")]
        if not line.startswith("| ") or len(cells) != 6 or cells[0] == "Family":
            continue
        name, status, path, error, bound, note = cells
        rows[name] = Row(status, path, float(error) if error else None, float(bound), note)
    return rows
