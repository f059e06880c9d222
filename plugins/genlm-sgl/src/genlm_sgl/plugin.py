"""Registers the engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl
from genlm_sgl.versions import INSTALL, TESTED


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the engine without importing SGLang or torch."""
    yield BackendSpec(
        name="sgl",
        kind="engine",
        target="genlm_sgl.engine:SGLEngine",
        summary="SGLang's models and kernels in this process",
        capabilities=("lora", "prefix_cache", "score", "weights"),
        requires=("sglang",),
        install=INSTALL,
        conformance="genlm_sgl.conformance:targets",
        tested={
            "sglang": TESTED,
            "torch": ("2.13.0", "2.14.1"),
            "transformers": ("5.19.0",),
        },
    )
