"""The methods of `AsyncLM` for changes of weights."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch

from genlm.core.base.blocking import blocking, off_loop
from genlm.core.base.errors import EngineDiedError, describe_error
from genlm.core.engine.engine import Capability, Engine, WeightsEngine
from genlm.core.model.requests import Requests
from genlm.core.scheduler import Scheduler

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]] | Callable[[Any], object]
"""Weights by name, or a function of the engine that changes them."""


class WeightMethods:
    """The methods of `AsyncLM` for changes of weights."""

    _scheduler: Scheduler[Engine]
    _requests: Requests
    _require: Callable[[Capability], None]

    async def aupdate_weights(self, weights: Weights | None = None) -> None:
        """Replace the weights of the base model, for example after a step of an optimizer.

        Earlier requests complete with the earlier weights. Requests that are sent after the
        call use the new ones; those sent during the call use either, each of them one. Results,
        keys and values of the earlier weights are dropped, pinned prefixes included. Contexts,
        populations and adapters remain valid; their tokens are computed again.

        Args:
            weights: All weights by name, as a mapping or as pairs: `model.state_dict()` of a
                transformers model, or the tensors of a checkpoint. Weights that the model
                shares may have one name or all. Their dtypes and devices may differ from the
                model's. They are copied, and must not change during the call. Or a function
                that changes the weights, which is called with the engine on the engine's
                thread. None if the weights have been changed already and no request was
                pending.

        Raises:
            UnsupportedCapabilityError: The engine cannot replace weights.
            ValueError: The weights do not fit the model, which is unchanged, or one of them has
                no data in this process: it is on the meta device, or sharded.
            TypeError: `weights` or one of them is of another type.
            EngineDiedError: The engine raised while it replaced the weights, and was closed.
            Exception: The error of a function that changes the weights.
        """
        self._require(Capability.WEIGHTS)
        change = _checked_weights(weights)

        def update(engine: Engine) -> None:
            try:
                _update(cast("WeightsEngine", engine), change)
            except EngineDiedError as error:
                self._scheduler.end(error)
                raise
            finally:
                self._requests.results.change_weights()

        await off_loop(functools.partial(self._scheduler.run, update, exclusively=True))

    update_weights = blocking(aupdate_weights, "update_weights")

    def weights_version(self, lora_name: str | None = None) -> Hashable:
        """Return a value that changes with the weights, for programs that cache results.

        The value changes after `update_weights`, after a change of the weights that the engine
        detects, and if another adapter is loaded under the name. A program that caches results
        reads it before it requests them, and stores it in their keys.

        Args:
            lora_name: Name of a loaded adapter; by default the adapter of `with_lora`.

        Raises:
            UnknownAdapterError: `lora_name` is not loaded.
            EngineClosedError: The model was closed.
        """
        requests = self._requests
        return requests.results.weight_changes(), requests.adapter(lora_name).engine_name


def _update(
    engine: WeightsEngine, weights: Mapping[str, Any] | Callable[[Any], object] | None
) -> None:
    change = weights if callable(weights) else None
    try:
        if change is not None:
            change(engine)
    finally:
        try:
            engine.update_weights(None if change is not None else cast("Any", weights))
        except ValueError:
            raise
        except Exception as error:
            raise EngineDiedError(
                f"the engine raised while its weights were replaced: {describe_error(error)}. "
                f"Load the model again"
            ) from error


def _checked_weights(
    weights: object,
) -> dict[str, Any] | Callable[[Any], object] | None:
    if isinstance(weights, torch.nn.Module):
        raise TypeError(
            f"weights is a {type(weights).__name__}; pass its weights, model.state_dict()"
        )
    if isinstance(weights, (str, bytes, os.PathLike)):
        raise TypeError(
            f"weights={weights!r}; pass the tensors, such as safetensors.torch.load_file(path)"
        )
    if inspect.iscoroutinefunction(weights):
        raise TypeError("weights is a coroutine function; pass a function")
    if weights is None or callable(weights):
        return weights
    try:
        by_name = dict(cast("Any", weights))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"weights is a {type(weights).__name__}; expected a mapping from names to tensors, "
            f"pairs of names and tensors, or a function of the engine"
        ) from error
    wrong = next((name for name in by_name if not isinstance(name, str)), None)
    if wrong is not None or not by_name:
        raise TypeError(
            "weights is empty" if wrong is None else f"the name of a weight is {wrong!r}"
        )
    return {name: _checked_weight(name, value) for name, value in by_name.items()}


def _checked_weight(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.tensor(value)  # `from_numpy` warns about read-only arrays, as of JAX
    if not hasattr(value, "shape"):
        raise TypeError(f"the weight {name!r} is a {type(value).__name__}; expected a tensor")
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "full_tensor"):  # of torch.distributed.tensor.DTensor
        raise ValueError(
            f"the weight {name!r} is sharded; pass the result of its method full_tensor(), "
            f"which every rank must call"
        )
    if value.is_meta:
        raise ValueError(
            f"the weight {name!r} is on the meta device and has no data; pass tensors with data"
        )
    return value.detach()
