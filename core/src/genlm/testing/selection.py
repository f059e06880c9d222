"""From a backend's name to the cases to run: each check with each target."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genlm import BackendInfo, find_backend, get_backend, list_backends
from genlm.testing.check import Check
from genlm.testing.checks import all_checks
from genlm.testing.target import EngineTarget, Target, TrieTarget

__all__ = ["Case", "cases_of", "find", "targets_of"]


@dataclass(frozen=True)
class Case:
    """One check of one target."""

    check: Check
    target: Target

    @property
    def id(self) -> str:
        """`check[model]`, unique within a run."""
        return f"{self.check.id}[{self.target.model}]"


def find(backend: str) -> BackendInfo:
    """Describe an installed engine or trie, whichever has the name.

    Raises:
        PluginError: There is none, or it cannot be used.
    """
    tries = {name for info in list_backends("trie") for name in (info.name, info.provider)}
    engines = {name for info in list_backends("engine") for name in (info.name, info.provider)}
    return find_backend(backend, "trie" if backend in tries - engines else "engine")


def targets_of(info: BackendInfo, folder: Path, model: str | None = None) -> list[Target]:
    """The targets that a backend brings, or one made of `model`.

    Args:
        info: An installed backend.
        folder: Empty; outlives the run.
        model: What the engine calls a model, to be checked without an oracle.

    Raises:
        LookupError: It brings none, and no model is given.
        TypeError: What `BackendSpec.conformance` names is no target.
    """
    if model is not None:
        return [_without_oracle(info, model)]
    if info.conformance is None:
        raise LookupError(
            f"{info.provider} brings no conformance target. Name one in its BackendSpec "
            f"(conformance='package.module:target'), or check it without an oracle: "
            f"genlm check {info.name} --model MODEL"
        )
    module, _, attribute = info.conformance.partition(":")
    brought: Any = getattr(importlib.import_module(module), attribute)
    if callable(brought):
        brought = brought(folder)
    targets = list(brought) if isinstance(brought, Iterable) else [brought]
    for target in targets:
        if not isinstance(target, (EngineTarget, TrieTarget)) or target.kind != info.kind:
            raise TypeError(
                f"{info.conformance} gave {target!r}; expected a target of an {info.kind}"
            )
    return targets


def cases_of(targets: Sequence[Target]) -> list[Case]:
    """Every check with every target, target by target."""
    return [Case(check, target) for target in targets for check in all_checks(target.kind)]


def _without_oracle(info: BackendInfo, model: str) -> EngineTarget:
    build = get_backend(info.provider)
    return EngineTarget(
        model=model, build=lambda **options: build(model, **options), oracle=None
    )
