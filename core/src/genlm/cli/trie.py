"""`genlm trie`: print or visualise the token trie of a few texts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from genlm.core.errors import MissingRequirementError

__all__ = ["trie"]


def trie(
    texts: Annotated[list[str], typer.Argument(help="The tokens.")],
    weight: Annotated[
        list[float] | None,
        typer.Option("--weight", "-w", help="One weight a text, in order; all or none."),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option(min=2, help="Show at most this many nodes; collapse the others.")
    ] = 200,
    dot: Annotated[bool, typer.Option("--dot", help="Print Graphviz source.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="Write an image to this file (needs the package graphviz and the program dot)."
        ),
    ] = None,
) -> None:
    """Print or visualise the token trie of some texts."""
    if svg is not None and dot:
        raise typer.BadParameter("--dot and --svg exclude each other")
    if svg is not None and not svg.parent.is_dir():
        raise typer.BadParameter(f"folder not found: {svg.parent}", param_hint="--svg")
    from genlm.core.trie import TokenCharacterTrie
    from genlm.core.trie.visualisation import (
        dot_source,
        node_values,
        text_lines,
        visible_tree,
    )
    from genlm.core.vocab import Token

    tokens = [Token(position, text.encode()) for position, text in enumerate(texts)]
    found = TokenCharacterTrie(tokens)
    ws = found.weight_sum(weight) if weight else None
    if svg is not None:
        if shutil.which("dot") is None:
            raise MissingRequirementError("--svg", ["dot"], "install Graphviz (graphviz.org)")
        svg.write_bytes(found.visualize(ws, max_nodes=max_nodes).pipe())
        typer.echo(f"wrote {svg}")
        return
    top = visible_tree(found, node_values(found, ws), max_nodes)
    if dot:
        typer.echo(dot_source(top, found), nl=False)
        return
    for line in text_lines(top):
        typer.echo(line)
