"""Load options of replicas, and the versions and limits that apply to their programs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genlm.plugin import (
    ModelLoadError,
    checked_integer,
    find_backend,
    installed_versions,
    options_mapping,
)

Resources = Mapping[str, float] | Sequence[Mapping[str, float]]

_COMPARED_DISTRIBUTIONS = ("genlm-core", "genlm-ray", "torch", "numpy")
"""Ray itself refuses a process with another version of Ray or Python."""

_MINOR_VERSIONS = frozenset({"torch", "numpy"})
"""Distributions of which only the major and minor version must be equal."""


def check_seconds(**times: float) -> None:
    """Raise `ValueError` unless times are finite and above 0."""
    for name, time_s in times.items():
        if not (isinstance(time_s, (int, float)) and 0 < time_s < math.inf):
            raise ValueError(f"{name}={time_s!r}: expected a finite time above 0, in seconds")


def compared_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return the parts of installed versions that drivers and replicas have in common."""
    return {
        name: ".".join(version.split(".")[:2]) if name in _MINOR_VERSIONS else version
        for name, version in installed_versions(distributions).items()
    }


def versions(engine: str) -> dict[str, str]:
    """Return the versions that drivers and replicas of an engine must have in common."""
    return compared_versions([*_COMPARED_DISTRIBUTIONS, find_backend(engine).distribution])


@dataclass(frozen=True)
class ServingLimits:
    """Resource limits of the programs that share a replica.

    Attributes:
        clients: Maximum number of concurrent programs.
        pending_queries: Maximum number of unanswered queries of a program.
        sequences: Maximum number of sequences in the populations of a program.
        prefix_tokens: Maximum number of tokens in the cached prefixes of a program.
        adapters: Maximum number of loaded adapters of a program.
        reduction_s: Maximum time in seconds of a program's user-defined reductions of a batch
            of rows or of a part of a text.
    """

    clients: int = 128
    pending_queries: int = 8192
    sequences: int = 2**17
    prefix_tokens: int = 2**15
    adapters: int = 8
    reduction_s: float = 60.0

    def check(self, error: type[Exception], **amounts: int) -> None:
        """Raise an error of this type if an amount exceeds its limit."""
        for name, amount in amounts.items():
            limit = getattr(self, name)
            if amount > limit:
                raise error(
                    f"the served model allows at most {limit} {name.replace('_', ' ')} in a "
                    f"replica (ServingLimits.{name}), and {amount} are needed"
                )


_NO_LIMIT = sys.maxsize

UNLIMITED = ServingLimits(_NO_LIMIT, _NO_LIMIT, _NO_LIMIT, _NO_LIMIT, _NO_LIMIT, math.inf)
"""Limits of a private replica, which has only one program."""


@dataclass(frozen=True)
class ReplicaSpec:
    """Load options of a replica.

    Attributes:
        engine: Name of a backend.
        model: Model id or path for the backend.
        driver_timeout_s: Time without a message after which a driver is considered dead and
            its requests are dropped.
        name: Name of a served model; `""` for a private replica.
        replicas: Number of replicas of the model.
        engine_opts: Further options of the backend.
        resources: Resources of a replica; see `RayEngine`.
        max_restarts: Maximum number of restarts of each replica; -1 for no limit.
        limits: Resource limits of each driver.
        step_timeout_s: Maximum duration of an engine step, after which the process ends.
        load_timeout_s: Maximum time for loading the replicas.
        place_timeout_s: Maximum time to wait for resources of the cluster that are in use.

    Raises:
        TypeError: The model is an object, which cannot be sent, `engine_opts` is not a mapping,
            or `replicas` is not an integer.
        ValueError: `replicas` is less than 1, `place_timeout_s` is less than 0, or another
            timeout is not finite and above 0.
        PluginError: The backend is not installed.
    """

    engine: str
    model: str
    driver_timeout_s: float = 60.0
    name: str = ""
    replicas: int = 2
    engine_opts: Mapping[str, Any] | None = None
    resources: Resources | None = None
    max_restarts: int = 3
    limits: ServingLimits = UNLIMITED
    step_timeout_s: float = 3600.0
    load_timeout_s: float = 1800.0
    place_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(
                f"model is a {type(self.model).__name__}; replicas load models themselves: "
                f"pass a folder or a name"
            )
        options_mapping("engine_opts", self.engine_opts)
        checked_integer("replicas", self.replicas, 1)
        check_seconds(
            driver_timeout_s=self.driver_timeout_s,
            step_timeout_s=self.step_timeout_s,
            load_timeout_s=self.load_timeout_s,
        )
        wait_s = self.place_timeout_s
        if not (isinstance(wait_s, (int, float)) and wait_s >= 0):
            raise ValueError(
                f"place_timeout_s={wait_s!r}: expected a time in seconds, 0 or more"
            )
        if find_backend(self.engine).name == "ray":
            raise ModelLoadError("engine='ray' has no replicas; name the engine to replicate")
