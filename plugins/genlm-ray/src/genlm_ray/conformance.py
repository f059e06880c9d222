"""The targets of `genlm check ray`: two replicas of the reference engine, private and served.

The models and oracles are those of the core's targets. Replicas are slow to start, so all
checks of a target use the same two.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genlm.testing import EngineTarget
from genlm.testing.core_targets import reference_targets

__all__ = ["CLUSTER", "RESOURCES", "targets"]

CLUSTER = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
"""Arguments of `ray.init`, if this process starts the cluster."""

RESOURCES = {"num_cpus": 0.1}
"""Small enough for several models on any machine."""

_MOST_CONTEXTS = 200


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield two private and two served replicas of the reference engine.

    Args:
        folder: Folder for the adapters' texts.
    """
    for name, build in {"private": _private, "served": _served}.items():
        [target] = reference_targets(folder / name)
        loaded: Any = target.build  # a partial, whose keywords are the engine's options
        yield dataclasses.replace(
            target,
            model=name,
            build=functools.partial(build, loaded.keywords),
            shared=True,
            timeout_s=300.0,  # processes start slowly on a busy machine
        )


def _private(engine_opts: Mapping[str, Any], **options: Any) -> Any:
    from genlm_ray.engine import RayEngine
    from genlm_ray.router import Router

    class Forgetful(RayEngine):
        """Remembers few contexts, so that they are dropped while queries name them."""

        make_router = staticmethod(functools.partial(Router, max_contexts=_MOST_CONTEXTS))

    return Forgetful(
        "demo",
        engine="reference",
        replicas=2,
        engine_opts={**engine_opts, **options},
        resources=RESOURCES,
        ray_opts=CLUSTER,
    )


def _served(engine_opts: Mapping[str, Any], **options: Any) -> Any:
    import ray

    from genlm_ray import cluster, serving
    from genlm_ray.engine import RayEngine

    class Served(RayEngine):
        """A served model that ends with the target."""

        def close(self) -> None:
            super().close()
            if ray.is_initialized():  # else the cluster and its replicas have ended
                serving.stop(name)

    name = f"conformance-{uuid.uuid4().hex[:8]}"
    cluster.connect(None, CLUSTER, default="local")
    serving.serve(
        name,
        "demo",
        "reference",
        replicas=2,
        engine_opts={**engine_opts, **options},
        resources=RESOURCES,
    )
    return Served(name)
