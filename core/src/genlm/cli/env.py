"""`genlm env`: versions, hardware and plugins, for bug reports."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from genlm.cli.arguments import JsonOption
from genlm.cli.output import print_json
from genlm.cli.tested_versions import tested_versions
from genlm.core.base.errors import GenlmError, describe_error
from genlm.core.plugins.lookup import list_backends
from genlm.engines.memory import free_memory_bytes
from genlm.engines.versions import installed_versions

_WITHOUT_PLUGINS = ("genlm-core", "genlm-backend", "genlm-lm-eval")

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables in addition to those that begin with GENLM_; they contain no secrets or paths."""


def env(
    as_json: JsonOption = False,
) -> None:
    """Print versions, hardware and the status of plugins, for bug reports."""
    report = environment()
    if as_json:
        print_json(report)
        return
    plugins, error = report.pop("plugins"), report.pop("plugin error", None)
    for title, section in report.items():
        typer.echo(title)
        for name, value in section.items():
            typer.echo(f"  {name:<22} {value}")
    typer.echo("plugins" if error is None else f"plugins cannot be listed: {error}")
    for info in plugins:
        reason = f": {info['reason']}" if info["reason"] else ""
        typer.echo(f"  {info['provider']:<30} {info['version']}  {info['status']}{reason}")
        for versions in tested_versions(info["tested"]):
            typer.echo(f"    tested with {versions}")


def environment() -> dict[str, Any]:
    """Return the sections of the report, each a mapping; `plugins` is a list.

    If the plugins cannot be listed, `plugin error` is the reason.
    """
    failure: dict[str, Any] = {}
    try:
        plugins = [dataclasses.asdict(info) for info in list_backends()]
    except GenlmError as error:  # one of GENLM_PLUGINS or GENLM_STRICT
        plugins, failure = [], {"plugin error": str(error)}
    distributions = sorted({*_WITHOUT_PLUGINS, *(info["distribution"] for info in plugins)})
    fields = (
        "name", "kind", "provider", "version", "status", "reason", "capabilities", "tested",
    )  # fmt: skip
    return {
        "genlm": installed_versions(distributions),
        "system": {
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": _cores(),
            "free memory": f"{free_memory_bytes() / 2**30:.1f} GiB",
        },
        "libraries": installed_versions(sorted(_libraries(distributions, plugins))),
        "devices": _devices(),
        "variables": _variables(os.environ),
        "plugins": [{name: info[name] for name in fields} for info in plugins],
        **failure,
    }


def _libraries(distributions: Iterable[str], plugins: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the libraries that distributions of genlm require or were tested with."""
    libraries = {name for info in plugins for name in info["tested"]}
    for distribution in installed_versions(distributions):
        for requirement in importlib.metadata.requires(distribution) or ():
            libraries.add(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    return libraries - {*distributions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?"
    return f"{os.cpu_count()}, usable: {usable}"


def _devices() -> dict[str, str]:
    """Describe the accelerators that torch finds, or why torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        return {"torch": f"cannot be imported: {describe_error(error)}"}
    devices = {"torch built for": torch.version.cuda or torch.version.hip or "the CPU only"}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = (
            f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability "
            f"{device.major}.{device.minor}"
        )
    if torch.backends.mps.is_available():
        devices["mps"] = "available"
    return devices


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("GENLM_") or name in _VARIABLES
    }
