"""The one hook that a plugin implements."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from genlm.core.plugins.spec import BackendSpec

__all__ = ["PROJECT", "genlm_backends", "hookimpl"]

PROJECT = "genlm"
"""pluggy's project name and the group of the entry points."""

hookspec = pluggy.HookspecMarker(PROJECT)

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of `genlm_backends`."""


@hookspec
def genlm_backends() -> Iterable[BackendSpec]:
    """Yield a `BackendSpec` for each backend that the module offers.

    The module that an entry point names is imported to read its specs, so it
    imports nothing heavy itself: the engine's own module is `BackendSpec.target`.
    Each name that is yielded needs an entry point of that name.
    """
    raise NotImplementedError  # a specification, called by nobody
