"""The targets of `genlm check ray`: two replicas of an engine.

Private and served replicas of the reference engine have the models and oracles of the core's
targets. Replicas of `hf`, if it is installed, cache prefixes. Replicas start slowly, so all
checks of a target use the same two replicas.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genlm.testing import EngineTarget, TinyModel, families
from genlm.testing.core_targets import reference_targets

CLUSTER = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
"""Arguments of `ray.init` if this process starts the cluster."""

RESOURCES = {"num_cpus": 0.1}
"""Resources of a replica, small enough for several models on any machine."""

_TIMEOUT_S = 300.0
"""Time limit of a request; processes start slowly on a busy machine."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield two private and two served replicas of the reference engine, and two of `hf`.

    Args:
        folder: Folder for models and adapters.
    """
    for name, build in {"private": _private, "served": _served}.items():
        [target] = reference_targets(folder / name)
        engine_build: Any = target.build  # a partial with the engine's options as keywords
        yield dataclasses.replace(
            target,
            model=name,
            build=functools.partial(build, "demo", "reference", engine_build.keywords),
            shared=True,
            timeout_s=_TIMEOUT_S,
        )
    if importlib.util.find_spec("genlm_hf") is not None:
        model = TinyModel.of(
            folder / "hf",
            families(head_dim=8)["llama"],
            adapters=("red", "blue"),
            lora={"target_modules": ["q_proj", "down_proj"]},
        )
        yield EngineTarget(
            model="hf",
            build=functools.partial(
                _private, str(model.path), "hf", {"dtype": "float32", "self_test": False}
            ),
            oracle=model.logprobs,
            adapters=model.adapters,
            tight_options=[{"kv_budget_bytes": 2048}],
            shared=True,
            timeout_s=_TIMEOUT_S,
        )


def _private(model: str, engine: str, engine_opts: Mapping[str, Any], **options: Any) -> Any:
    from genlm_ray.engine import RayEngine

    return RayEngine(
        model,
        engine=engine,
        replicas=2,
        engine_opts={**engine_opts, **options},
        resources=RESOURCES,
        ray_opts=CLUSTER,
    )


def _served(model: str, engine: str, engine_opts: Mapping[str, Any], **options: Any) -> Any:
    import ray

    from genlm_ray import cluster, serving
    from genlm_ray.engine import RayEngine

    class ServedEngine(RayEngine):
        """A served model that is stopped when the target is closed."""

        def close(self) -> None:
            super().close()
            if ray.is_initialized():  # otherwise the replicas have ended
                serving.stop(name)

    name = f"conformance-{uuid.uuid4().hex[:8]}"
    cluster.connect(None, CLUSTER, default="local")
    serving.serve(
        name,
        model,
        engine,
        replicas=2,
        engine_opts={**engine_opts, **options},
        resources=RESOURCES,
    )
    return ServedEngine(name)
