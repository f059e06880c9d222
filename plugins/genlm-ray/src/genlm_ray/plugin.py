"""Registers the engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the engine without importing Ray or torch."""
    yield BackendSpec(
        name="ray",
        kind="engine",
        target="genlm_ray.engine:RayEngine",
        summary="Replicas of any other engine on a Ray cluster, private or served",
        capabilities=("lora", "prefix_cache", "score"),
        requires=("ray",),
        conformance="genlm_ray.conformance:targets",
        tested={"ray": ("2.60.0",), "torch": ("2.11.0", "2.13.0", "2.15.0")},
    )
