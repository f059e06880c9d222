"""Collects the cases of a backend: each check with each of its targets."""

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

_SHOWN_NAMES = 3

MODEL_TIMEOUT_S = 600.0
"""Time limit for loading a user's own model and for each answer."""


@dataclass(frozen=True)
class Case:
    """One check of one target, and the installed backend that the target belongs to."""

    check: Check
    target: Target
    info: BackendInfo | None = None

    @property
    def id(self) -> str:
        """`check[model]`, unique within a run."""
        return f"{self.check.id}[{self.target.model}]"


def find(backend: str) -> BackendInfo:
    """Describe the installed engine or trie of this name.

    Raises:
        PluginError: It is not installed or cannot be used.
    """
    tries = {name for info in list_backends("trie") for name in (info.name, info.provider)}
    engines = {name for info in list_backends("engine") for name in (info.name, info.provider)}
    return find_backend(backend, "trie" if backend in tries - engines else "engine")


def targets_of(
    info: BackendInfo, folder: Path, model: str | None = None, dtype: str = "float32"
) -> list[Target]:
    """The targets of a backend, or one made of `model`.

    Args:
        info: An installed backend.
        folder: An empty folder that is kept until the run ends.
        model: A model for the engine to load, to be checked without an oracle.
        dtype: Dtype in which that model computes.

    Raises:
        LookupError: It has none, and `model` is None.
        TypeError: `BackendSpec.conformance` names something other than a target.
        ValueError: `dtype` has no tolerance.
    """
    if model is not None:
        return [_without_oracle(info, model, dtype)]
    if info.conformance is None:
        raise LookupError(
            f"{info.provider} has no conformance target. Name one in its BackendSpec "
            f"(conformance='package.module:target'), or check it without an oracle: "
            f"genlm check {info.name} --model MODEL"
        )
    module, _, attribute = info.conformance.partition(":")
    found: Any = getattr(importlib.import_module(module), attribute)
    if callable(found):
        found = found(folder)
    targets = list(found) if isinstance(found, Iterable) else [found]
    for target in targets:
        if not isinstance(target, (EngineTarget, TrieTarget)) or target.kind != info.kind:
            raise TypeError(
                f"{info.conformance} gave {target!r}; expected a target of an {info.kind}"
            )
    return targets


def cases_of(targets: Sequence[Target], info: BackendInfo | None = None) -> list[Case]:
    """Every check with every target, target by target.

    Args:
        targets: Targets of one backend.
        info: That backend, if it is installed.
    """
    return [
        Case(check, target, info) for target in targets for check in all_checks(target.kind)
    ]


def chosen(cases: Sequence[Case], only: Sequence[str], models: Sequence[str]) -> list[Case]:
    """The cases of these checks and models.

    Args:
        cases: All cases.
        only: Ids of checks or of cases; all if empty.
        models: Names of targets; all if empty.

    Raises:
        LookupError: A name is unknown.
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
            raise LookupError(f"no {what} {name!r}. {_nearest(name, known)}")


def _nearest(name: str, known: set[str]) -> str:
    """Suggest a few of many names."""
    ids = known if "[" in name else {each for each in known if "[" not in each} or known
    close = difflib.get_close_matches(name, ids, n=_SHOWN_NAMES, cutoff=0.5)
    close = close or sorted(each for each in ids if name in each)[:_SHOWN_NAMES]
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"`genlm check BACKEND --list` prints all {len(ids)}"


def _without_oracle(info: BackendInfo, model: str, dtype: str) -> EngineTarget:
    build = get_backend(info.provider)
    return EngineTarget(
        model=model,
        build=lambda **options: build(model, **options),
        oracle=None,
        dtype=dtype,
        timeout_s=MODEL_TIMEOUT_S,
        shared=True,  # a large model fits into memory once and loads slowly
    )
