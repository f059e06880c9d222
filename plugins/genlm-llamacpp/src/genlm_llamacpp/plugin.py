"""Registers the engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the engine without loading llama.cpp or torch."""
    yield BackendSpec(
        name="llamacpp",
        kind="engine",
        target="genlm_llamacpp.engine:LlamaCppEngine",
        summary="GGUF files on llama.cpp, every prefix computed once",
        capabilities=("lora", "prefix_cache", "score"),
        requires=("xllamacpp",),
        install="pip install xllamacpp==2026.10.11549",
        conformance="genlm_llamacpp.conformance:targets",
        tested={
            "xllamacpp": ("2026.10.11549",),
            "torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"),
        },
    )
