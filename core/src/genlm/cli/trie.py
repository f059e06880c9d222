"""`genlm trie`: print or draw the token trie of a few texts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from genlm.core.errors import MissingRequirementError

__all__ = ["trie"]


def trie(
    texts: Annotated[list[str], typer.Argument(help="One token each.")],
    weight: Annotated[
        list[float] | None,
        typer.Option("--weight", "-w", help="Weight of a text, in order; all or none."),
    ] = None,
    max_nodes: Annotated[
        int, typer.Option(min=2, help="Draw about this many nodes, fold the others.")
    ] = 200,
    dot: Annotated[bool, typer.Option("--dot", help="Print Graphviz source.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            help="Draw into this file (needs the package graphviz and the program dot)."
        ),
    ] = None,
) -> None:
    """Print the token trie of some texts, or draw it."""
    if svg is not None and dot:
        raise typer.BadParameter("--dot prints and --svg draws; take one of them")
    if svg is not None and not svg.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {svg.parent}", param_hint="--svg")
    from genlm.core.trie.drawing import dot_source, node_values, sketch, text_lines
    from genlm.core.trie.trie import TokenCharacterTrie
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
    top = sketch(found, node_values(found, ws), max_nodes)
    if dot:
        typer.echo(dot_source(top, found), nl=False)
        return
    for line in text_lines(top):
        typer.echo(line)
