"""From a backend's name to the cases to run: each check with each target."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genlm import BackendInfo, find_backend, get_backend, list_backends
from genlm.testing.check import Check
from genlm.testing.checks import all_checks
from genlm.testing.target import EngineTarget, Target, TrieTarget

__all__ = ["Case", "cases_of", "chosen", "find", "targets_of"]

MODEL_PATIENCE_S = 600.0
"""How long a model of the user's own may take to load, or to answer."""


@dataclass(frozen=True)
class Case:
    """One check of one target; of which backend, if it is an installed one's."""

    check: Check
    target: Target
    info: BackendInfo | None = None

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


def targets_of(
    info: BackendInfo, folder: Path, model: str | None = None, dtype: str = "float32"
) -> list[Target]:
    """The targets that a backend brings, or one made of `model`.

    Args:
        info: An installed backend.
        folder: Empty; outlives the run.
        model: What the engine calls a model, to be checked without an oracle.
        dtype: In which that model computes.

    Raises:
        LookupError: It brings none, and no model is given.
        TypeError: What `BackendSpec.conformance` names is no target.
        ValueError: No tolerance is known for `dtype`.
    """
    if model is not None:
        return [_without_oracle(info, model, dtype)]
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


def cases_of(targets: Sequence[Target], info: BackendInfo | None = None) -> list[Case]:
    """Every check with every target, target by target.

    Args:
        targets: Of one backend.
        info: That backend, if it is installed.
    """
    return [
        Case(check, target, info) for target in targets for check in all_checks(target.kind)
    ]


def chosen(cases: Sequence[Case], only: Sequence[str], models: Sequence[str]) -> list[Case]:
    """The cases of these checks and models; of all, where none are named.

    Args:
        cases: All there are.
        only: Ids of checks, or of cases.
        models: Names of targets.

    Raises:
        LookupError: A name that nothing has.
    """
    known = {case.check.id for case in cases} | {case.id for case in cases}
    _refuse_unknown("check", only, known)
    _refuse_unknown("model", models, {case.target.model for case in cases})
    return [
        case
        for case in cases
        if (not only or case.id in only or case.check.id in only)
        and (not models or case.target.model in models)
    ]


def _refuse_unknown(what: str, names: Sequence[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise LookupError(
                f"no {what} {name!r}.{hint} There are: {', '.join(sorted(known))}"
            )


def _without_oracle(info: BackendInfo, model: str, dtype: str) -> EngineTarget:
    build = get_backend(info.provider)
    return EngineTarget(
        model=model,
        build=lambda **options: build(model, **options),
        oracle=None,
        dtype=dtype,
        patience_s=MODEL_PATIENCE_S,
        shared=True,  # it may be large: there is room for it once, and time
    )
