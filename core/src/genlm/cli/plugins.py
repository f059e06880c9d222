"""`genlm plugins`: list the installed backends, or describe one of them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genlm.cli.arguments import backends as complete_backends
from genlm.cli.documented_options import Option, options_of
from genlm.cli.output import borderless_table, output_console, print_json
from genlm.cli.tested_versions import tested_versions
from genlm.core.plugins.lookup import find_backend, list_backends
from genlm.core.plugins.registry import PUBLISHED
from genlm.core.plugins.spec import BackendInfo

_COLOURS = {"ok": "green", "disabled": "bright_black"}

_UNUSABLE = {"broken", "incompatible", "disabled"}
"""Statuses of backends that cannot be loaded; their capabilities may be unknown."""

_CAPABILITIES = {
    "lora": "LoRA adapters per request: llm.load_lora(folder, name), lora_name=name",
    "score": "scores all tokens of a text in one pass: llm.score, llm.batch_score",
    "prefix_cache": "caches computed prefixes: llm.pin_prefix, llm.clear_kv_cache",
    "weights": "accepts new weights of the base model: llm.update_weights(state_dict)",
}


def plugins(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a backend to describe with its options and capabilities.",
            autocompletion=complete_backends(),
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with every field.")
    ] = False,
) -> None:
    """List the installed engines and tries, or describe one. No engine is imported."""
    backends = list_backends()
    if name is not None:
        backends = _find(name, backends)
    if as_json:
        print_json([_describe(info, options=name is not None) for info in backends])
        return
    console = output_console()
    if name is None:
        console.print(_table(backends))
        if not_installed := sorted(PUBLISHED.keys() - {info.name for info in backends}):
            names = ", ".join(not_installed)
            console.print(f"\nnot installed: {names}; `genlm plugins NAME` says how to get one")
        return
    for info in backends:
        _print(info, console)


def _find(name: str, backends: list[BackendInfo]) -> list[BackendInfo]:
    named = [info for info in backends if name in {info.name, info.provider}]
    if not named:
        find_backend(name, PUBLISHED[name][0] if name in PUBLISHED else "engine")  # raises
    return named


def _describe(info: BackendInfo, *, options: bool) -> dict[str, Any]:
    fields = dataclasses.asdict(info)
    if not options:
        return fields
    found = options_of(info.target)
    documented = None if found is None else [dataclasses.asdict(option) for option in found]
    return fields | {"options": documented, "links": dict(_links(info.distribution))}


def _links(distribution: str) -> Iterator[tuple[str, str]]:
    """Yield the label and the address of each link in the metadata of a distribution."""
    for entry in importlib.metadata.metadata(distribution).get_all("Project-URL") or ():
        label, _, address = entry.partition(",")
        yield label.strip(), address.strip()


def _print(info: BackendInfo, console: Console) -> None:
    title = Text(info.name, "bold")
    console.print(title.append(f": {info.summary}" if info.summary else "", "not bold"))
    facts = borderless_table("", style="dim", no_wrap=True)
    facts.show_header = False
    facts.add_column(overflow="fold")
    facts.add_row("status", Text(_status(info), style=_COLOURS.get(info.status, "red")))
    target = f" ({info.target})" if info.target else ""
    facts.add_row("provided by", f"{info.distribution} {info.version}{target}")
    if info.status not in _UNUSABLE:
        for fact in _usage(info):
            facts.add_row(*fact)
    elif info.status == "broken":
        facts.add_row("traceback", "GENLM_STRICT=1 genlm plugins")
    for label, address in _links(info.distribution):
        facts.add_row(label.lower(), address)
    console.print(facts)
    if info.status not in _UNUSABLE:
        console.print()
        console.print(_options(options_of(info.target), info.target))


def _usage(info: BackendInfo) -> Iterator[tuple[str, str]]:
    """Yield the requirements and capabilities of a backend, and how to load it."""
    name = info.provider if info.status == "ambiguous" else info.name
    yield "requires", ", ".join(info.requires) or "nothing else"
    for versions in tested_versions(info.tested):
        yield "tested with", versions
    for capability in info.capabilities:
        yield "capability", f"{capability}: {_CAPABILITIES.get(capability, 'see its pages')}"
    if info.kind == "engine":
        yield "load", f"genlm.load_model(model, {name!r}, **options)"
    else:
        yield "load", f"genlm.get_trie({name!r})(vocabulary, **options)"
    if info.conformance:
        yield "check", f"genlm check {name}"


def _options(options: list[Option] | None, target: str) -> Table | str:
    if options is None:
        return f"Its options are unknown: no __init__ of {target} was found in the source."
    if not options:
        return "It takes no options."
    table = borderless_table("option", "default", no_wrap=True)
    table.add_column("meaning", overflow="fold")
    for option in options:
        table.add_row(option.name, option.default or "required", option.meaning)
    return table


def _table(backends: list[BackendInfo]) -> Table:
    table = borderless_table("name", "kind", "provided by", "api", "capabilities", no_wrap=True)
    table.add_column("status", overflow="fold")
    for info in backends:
        table.add_row(
            info.name,
            info.kind or "?",
            f"{info.distribution} {info.version}",
            "?" if info.api is None else str(info.api),
            ", ".join(info.capabilities) or "-",
            Text(_status(info), style=_COLOURS.get(info.status, "red")),
        )
    return table


def _status(info: BackendInfo) -> str:
    if info.status == "missing":
        return f"missing: {', '.join(info.missing)}; {info.install}"
    return f"{info.status}: {info.reason}" if info.reason else info.status
