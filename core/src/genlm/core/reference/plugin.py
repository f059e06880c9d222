"""Registers the reference engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.core.plugins.spec import TESTED, BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the reference engine."""
    yield BackendSpec(
        name="reference",
        kind="engine",
        target="genlm.core.reference.engine:ReferenceEngine",
        capabilities=("lora",),
        summary="Exact byte n-gram model in closed form; small, for tests and trials",
        conformance="genlm.testing.core_targets:reference_targets",
        tested=TESTED,
    )
