"""Runs the notebooks of docs/tutorials/ and stores what their cells print and plot.

Cells are executed as Jupyter does, with `await` at the top level and one event loop; plots are
stored as SVG, as text. Sources and outputs are lists of lines, so that they compare well.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "genlm", "axes.facecolor": "none"}


def run_cell(
    runner: asyncio.Runner, source: str, names: dict[str, Any]
) -> list[dict[str, Any]]:
    """Execute one cell; return its outputs in the notebook format."""
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = eval(code, names)
        if inspect.isawaitable(result):
            runner.run(_awaited(result))
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    for number in plt.get_fignums():
        data = {"image/svg+xml": _svg(plt.figure(number))}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def run_notebook(path: Path) -> dict[str, Any]:
    """Return the notebook with the outputs of this run; the file is not changed."""
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    plt.close("all")  # figures of the process before
    names: dict[str, Any] = {}
    with asyncio.Runner() as runner, mpl.rc_context(STYLE):
        for number, cell in enumerate(code_cells(notebook), 1):
            cell["execution_count"] = number
            cell["outputs"] = run_cell(runner, "".join(cell["source"]), names)
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are executed, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


async def _awaited(result: Any) -> None:
    await result


def _svg(figure: Any) -> list[str]:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return [f"{line.rstrip()}\n" for line in file.getvalue().splitlines()]


def main() -> None:
    """Run all notebooks and write them with their outputs."""
    for path in NOTEBOOKS:
        text = json.dumps(run_notebook(path), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
