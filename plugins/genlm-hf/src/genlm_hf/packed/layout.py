"""Which attention layers a model has, found out by running it once.

A forward pass over a few tokens with a recording attention function shows the
layers in order, their heads and widths, the masks they are given, and every
argument that the packed attention would have to know. What it does not know makes
the model unfit; nothing is guessed from the model's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from genlm_hf.packed.windows import UnknownMaskError, window_of
from genlm_hf.storage import LayerShape
from genlm_hf.unfit import UnfitMaskError, UnfitModelError

__all__ = [
    "AttentionLayer",
    "AttentionLayout",
    "read_layout",
    "register",
]

_RECORDING_ATTENTION = "genlm_recording"

# Where a config says which attention function to use. The public setter would also reset the
# configs inside a config.
_ATTRIBUTE = "_attn_implementation_internal"

# What may be passed to an attention function: what the packed attention heeds too, and
# what changes nothing.
_KNOWN_ARGUMENTS = frozenset(
    {"is_causal", "scaling", "sliding_window", "softcap", "s_aux"}
    | {"dropout", "position_ids", "cache_position", "use_cache"}
    | {"return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        index: In the order in which layers run.
        window: How many tokens a token sees, itself included; None for all.
        shape: What the layer keeps of a token.
        softcap: Scores are bent to stay below it; None for no bending.
        sinks: Whether each head has a score that takes weight for nothing.
    """

    index: int
    window: int | None
    shape: LayerShape
    softcap: float | None
    sinks: bool


class AttentionLayout:
    """The attention layers of one model, and the switch that exchanges their function."""

    def __init__(self, model: torch.nn.Module, layers: dict[torch.nn.Module, AttentionLayer]):
        self._layers = layers
        self._configs = _configs(model)

    @property
    def layers(self) -> Sequence[AttentionLayer]:
        """All layers in order."""
        return list(self._layers.values())

    def layer(self, module: torch.nn.Module) -> AttentionLayer:
        """Return the layer that a module of the model is."""
        return self._layers[module]

    @contextmanager
    def runs(self, attention: str) -> Iterator[None]:
        """Let the model use the registered function of that name while in this context."""
        with _attention_function(self._configs, attention):
            yield


def register() -> None:
    """Make the recording attention function and its masks known to transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_RECORDING_ATTENTION, _record_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_RECORDING_ATTENTION, _record_mask)


def read_layout(model: torch.nn.Module, forward: Callable[[], object]) -> AttentionLayout:
    """Return the attention layers that a forward pass goes through.

    Args:
        model: Of transformers' interface.
        forward: Runs it on a few tokens of one sequence, with mask, without cache.

    Raises:
        UnfitModelError: Its attention differs from a plain decoder's in a way that
            the packed attention does not know.
    """
    configs = _configs(model)
    if not configs:
        raise UnfitModelError(f"none of its configs has the attribute {_ATTRIBUTE}")
    own = {getattr(config, _ATTRIBUTE) for config in configs}
    recorder = _active.recorder = _Recorder(eager=own != {"sdpa"})
    try:
        with _attention_function(configs, _RECORDING_ATTENTION):
            forward()
    except UnfitModelError:
        raise
    except Exception as error:
        raise UnfitModelError(
            f"with another attention function its forward pass raises "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        _active.recorder = None
    return AttentionLayout(model, recorder.layers)


class _Recorder:
    """What the layers of one forward pass were called with."""

    def __init__(self, *, eager: bool) -> None:
        self.layers: dict[torch.nn.Module, AttentionLayer] = {}
        self._eager = eager
        self._windows: dict[float, int | None] = {}

    def add_mask(self, window: int | None) -> float:
        """Return what to fill a mask with, by which it is known again on any device."""
        mark = len(self._windows) + 1000.5
        self._windows[mark] = window
        return mark

    def add_layer(
        self,
        module: torch.nn.Module,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        query, key, value = states
        if module in self.layers:
            raise UnfitModelError("an attention layer runs twice in a forward pass")
        if query.shape[2] != key.shape[2] or query.shape[0] != 1:
            raise UnfitModelError("an attention layer attends to other tokens than its own")
        self._check_arguments(module, arguments)
        sinks = arguments.get("s_aux") if self._eager else None
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise UnfitModelError(f"its attention sinks have the shape {tuple(sinks.shape)}")
        self.layers[module] = AttentionLayer(
            index=len(self.layers),
            window=self._window(mask, arguments),
            shape=LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device),
            softcap=arguments.get("softcap") if self._eager else None,
            sinks=sinks is not None,
        )

    def _check_arguments(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        if not arguments.get("is_causal", getattr(module, "is_causal", True)):
            raise UnfitModelError("an attention layer is not causal")
        # transformers' sdpa ignores what it does not know; a model's own eager may not.
        decisive = None if self._eager else {"position_bias", "cache"}
        for name, value in arguments.items():
            if value is None or name in _KNOWN_ARGUMENTS:
                continue
            if decisive is None or name in decisive:
                raise UnfitModelError(f"its attention has an argument {name!r}")

    def _window(self, mask: torch.Tensor | None, arguments: dict[str, Any]) -> int | None:
        if mask is None:
            if arguments.get("sliding_window") is not None:
                raise UnfitModelError("an attention layer has a sliding window without a mask")
            return None
        marks = torch.unique(mask).tolist()
        if len(marks) != 1 or marks[0] not in self._windows:
            raise UnfitMaskError("an attention layer makes a mask of its own")
        window = self._windows[marks[0]]
        if window == 0:  # Qwen2-MoE makes such a mask for layers that it need not have
            raise UnfitMaskError("an attention layer has a mask that hides every token")
        return window


class _Active(threading.local):
    recorder: _Recorder | None = None


_active = _Active()


def _record_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    assert _active.recorder is not None  # noqa: S101 - our own mistake
    _active.recorder.add_layer(module, (query, key, value), attention_mask, arguments)
    batch, heads, tokens, _ = query.shape
    return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


def _record_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    assert _active.recorder is not None  # noqa: S101 - our own mistake
    try:
        window = window_of(mask_function)
    except UnknownMaskError as error:
        raise UnfitMaskError(f"one of its masks is unknown: {error}") from error
    mark = _active.recorder.add_mask(window)
    return torch.full((batch_size, 1, q_length, kv_length), mark, device=device)


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the configs that the model's modules ask for their attention function."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, _ATTRIBUTE):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def _attention_function(configs: Sequence[Any], name: str) -> Iterator[None]:
    before = [getattr(config, _ATTRIBUTE) for config in configs]
    try:
        for config in configs:
            setattr(config, _ATTRIBUTE, name)
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            setattr(config, _ATTRIBUTE, own)
