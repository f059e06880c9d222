"""Selection of a model's execution path: by rules first, then by a self-test.

`execution_paths.json` lists the path of each family of models;
`scripts/architectures.py --backend hf` writes it together with docs/hf-architectures.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from genlm.plugin import ModelFacts, ModelLoadError, free_memory_bytes
from genlm.prefix import (
    ForwardFn,
    PathChoice,
    PrefixRows,
    SelfTest,
    ServeOptions,
    UnsupportedModelError,
    choose_path,
)
from genlm_hf.forward import accepted_arguments
from genlm_hf.packed.attention import PackedForward
from genlm_hf.packed.kernel_steps import KernelSteps
from genlm_hf.packed.layout import AttentionLayout, UnsupportedMaskError, read_layout
from genlm_hf.padded import PaddedPath
from genlm_hf.served_model import ServedModel
from genlm_hf.slot_cache import SlotCacheForward, read_cache
from genlm_hf.storage import KVStorage, LayerShape, default_budget_bytes

_logger = logging.getLogger("genlm_hf")

PATHS = ("packed", "slot_cache", "padded")
"""Execution paths, fastest first."""

# Kinds of layers with full or sliding-window attention.
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention", "sliding"}


def choose_execution_path(served: ServedModel, options: ServeOptions) -> PathChoice:
    """Return the fastest execution path that gives the right rows, or the requested one.

    Raises:
        ModelLoadError: The model is not a causal language model, or the requested path
            does not support it.
    """
    padded = PaddedPath(served)
    self_test = SelfTest(
        padded.sample_ids,
        padded,
        tolerance=served.row_tolerance,
        max_context=served.max_context,
        scale_tolerance=True,
    )
    choice = choose_path(
        type(served.model).__name__,
        {
            "packed": lambda budget: _packed_path(served, padded, budget),
            "slot_cache": lambda budget: _slot_cache_path(served, padded, budget),
        },
        padded,
        options=options,
        self_test=self_test.largest_error,
        logger=_logger,
    )
    if options.execution_path is None:
        _warn_if_slow(served.model, choice)
    return choice


def use_kernels(choice: PathChoice, *, graphs: bool | None) -> KernelSteps | None:
    """Return kernels that compute the steps of an execution path, if possible.

    Args:
        choice: The execution path.
        graphs: Whether steps are replayed from CUDA graphs; None replays them if possible.

    Returns:
        The kernels, None if they cannot compute steps of the model.

    Raises:
        ModelLoadError: `graphs` is True and steps cannot be captured.
    """
    forward = choice.path.forward if isinstance(choice.path, PrefixRows) else None
    try:
        if not isinstance(forward, PackedForward):
            raise UnsupportedModelError(
                f"it is served by the execution path {choice.name!r} ({choice.reason}), and "
                f"only 'packed' has graphs"
            )
        return forward.use_kernels(graphs=graphs is not False)
    except UnsupportedModelError as error:
        if not graphs:
            return None
        raise ModelLoadError(
            f"cuda_graphs=True is not possible: {error}. Load the model without cuda_graphs"
        ) from error


@functools.cache
def known_paths() -> Mapping[str, Mapping[str, str]]:
    """Return the listed `execution_paths` by `ModelFacts.key`, and the `versions` used."""
    file = importlib.resources.files("genlm_hf").joinpath("execution_paths.json")
    tables: dict[str, dict[str, str]] = json.loads(file.read_text("utf-8"))
    return tables


def known_path(model: Any) -> str | None:
    """Return the listed execution path of a model's family, None if it is not listed."""
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return known_paths()["execution_paths"].get(ModelFacts.of(config).key)


def _warn_if_slow(model: Any, choice: PathChoice) -> None:
    listed_path = known_path(model)
    if listed_path is None or PATHS.index(listed_path) >= PATHS.index(choice.name):
        return
    versions = [
        f"{library} {version} (installed: {importlib.metadata.version(library)})"
        for library, version in known_paths()["versions"].items()
    ]
    # Logged, not warned: programs that turn warnings into errors still get right rows,
    # and Python prints records of this level where logging is not configured.
    _logger.warning(
        "%s is served by the execution path %r, which is much slower than %r, the path of "
        "this model family with %s. Rows are right. Reason: %s. Install these versions, or "
        "report this; execution_path=%r suppresses this message",
        type(model).__name__,
        choice.name,
        listed_path,
        " and ".join(versions),
        choice.reason,
        choice.name,
    )


def _packed_path(served: ServedModel, padded: PaddedPath, budget: int | None) -> PrefixRows:
    """Return the path `packed`.

    Raises:
        UnsupportedModelError: The model breaks one of the rules.
    """
    if not accepted_arguments(served.model, {"position_ids": None}):
        raise UnsupportedModelError("its forward takes no position_ids")
    _refuse_by_config(served, padded)
    layout = _layout(served, padded)
    _require_all_layers(served, len(layout.layers), "use transformers' attention interface")
    storage = _storage([layer.shape for layer in layout.layers], budget)
    return _prefix_rows(PackedForward(served, layout, storage), served, padded, storage)


def _slot_cache_path(served: ServedModel, padded: PaddedPath, budget: int | None) -> PrefixRows:
    """Return the path `slot_cache`.

    Raises:
        UnsupportedModelError: The model breaks one of the rules.
    """
    _refuse_by_config(served, padded)
    if not padded.can_mix_lengths:
        raise UnsupportedModelError("padding changes its rows")
    try:
        _layout(served, padded)
    except UnsupportedMaskError:
        raise
    except UnsupportedModelError:
        pass  # this path supports custom attention functions
    shapes = read_cache(served, _probe_length(served))
    _require_all_layers(served, len(shapes), "keep keys and values")
    storage = _storage(shapes, budget)
    return _prefix_rows(SlotCacheForward(served, storage), served, padded, storage)


def _storage(shapes: list[LayerShape], budget: int | None) -> KVStorage:
    try:
        return KVStorage(shapes, default_budget_bytes(shapes) if budget is None else budget)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        device = shapes[0].device
        free = free_memory_bytes(device)
        raise ModelLoadError(
            f"{device} cannot allocate kv_budget_bytes={budget}; {free:,} bytes are free. Pass "
            f"a smaller budget, or none for a share of the free bytes"
        ) from error


def _prefix_rows(
    forward: ForwardFn, served: ServedModel, padded: PaddedPath, storage: KVStorage
) -> PrefixRows:
    return PrefixRows(
        forward,
        uncached=padded,
        vocabulary=served.vocabulary,
        budget_bytes=storage.budget_bytes,
        bytes_per_token=storage.bytes_per_token,
        max_tokens=served.max_tokens,
        max_rows=served.max_rows,
    )


def _layout(served: ServedModel, padded: PaddedPath) -> AttentionLayout:
    ids, positions = [0] * _probe_length(served), np.zeros((2, 1), np.int64)
    return read_layout(served.model, lambda: padded.logits([ids], positions))


def _probe_length(served: ServedModel) -> int:
    return min(3, served.max_context or 3)


def _refuse_by_config(served: ServedModel, padded: PaddedPath) -> None:
    config = served.model.config.get_text_config()
    if padded.by_longest:
        raise UnsupportedModelError("its rotary embedding depends on the longest sequence")
    unsupported = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if unsupported:
        raise UnsupportedModelError(
            f"it has layers of kind {', '.join(sorted(map(str, unsupported)))}"
        )


def _require_all_layers(served: ServedModel, count: int, condition: str) -> None:
    config = served.model.config.get_text_config()
    expected = getattr(config, "num_hidden_layers", None)
    if not count or count != expected:
        raise UnsupportedModelError(f"{count} of its {expected} layers {condition}")
