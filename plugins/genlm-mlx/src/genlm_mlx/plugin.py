"""Registers the engine."""

from __future__ import annotations

from collections.abc import Iterator

from genlm.plugin import BackendSpec, hookimpl


@hookimpl
def genlm_backends() -> Iterator[BackendSpec]:
    """Describe the engine without importing MLX or torch."""
    yield BackendSpec(
        name="mlx",
        kind="engine",
        target="genlm_mlx.engine:MLXEngine",
        summary="MLX models on Apple silicon, every prefix computed once",
        capabilities=("lora", "prefix_cache", "score", "weights"),
        requires=("mlx", "mlx_lm"),
        install="pip install mlx-lm (on Linux 'mlx-lm[cpu]' or 'mlx-lm[cuda13]')",
        conformance="genlm_mlx.conformance:targets",
        tested={
            "mlx": ("0.32.2", "0.32.4"),
            "mlx-lm": ("0.31.3", "0.32.2"),
            "transformers": ("5.19.0", "5.23.0", "5.24.0"),
            "torch": ("2.11.0", "2.13.0", "2.15.0"),
        },
    )
