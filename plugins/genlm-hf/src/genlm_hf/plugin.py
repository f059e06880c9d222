"""Registers the engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the engine without importing transformers or torch."""
    yield BackendSpec(
        name="hf",
        kind="engine",
        target="genlm_hf.engine:HFEngine",
        summary="Any decoder-only Hugging Face transformers model, batched across prefixes",
        capabilities=("lora", "prefix_cache", "score", "weights"),
        requires=("transformers",),
        conformance="genlm_hf.conformance:targets",
        tested={
            "transformers": ("5.17.0", "5.19.0", "5.23.0", "5.24.0"),
            "torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"),
            "peft": ("0.21.0", "0.21.2"),
        },
    )
