"""The attention layers of a model, read by running it once.

A forward pass over a few tokens with a recording attention function shows the layers in
order, their heads and widths, their masks, and every argument that the packed attention
must support. A model with an unknown argument is unsupported; nothing is inferred from the
model's name.

transformers' masks are functions of two positions. They are evaluated at positions far beyond
any test sequence, which distinguishes a window of 4,096 tokens from full attention without a
forward pass of 4,096 tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from genlm.plugin import describe_error
from genlm.prefix import UnsupportedModelError
from genlm_hf.forward import compute_logits
from genlm_hf.storage import LayerShape

# Names of registered attention functions. transformers makes masks for the second only.
_ATTENTION, _RECORDING_ATTENTION = "genlm", "genlm_recording"

# Attribute of configs that names the attention function. The public setter would also reset
# the configs inside a config.
_ATTRIBUTE = "_attn_implementation_internal"

# Arguments of attention functions that the packed attention supports, or that do not change
# the result.
_KNOWN_ARGUMENTS = frozenset(
    {"is_causal", "scaling", "sliding_window", "softcap", "s_aux"}
    | {"dropout", "position_ids", "cache_position", "use_cache"}
    | {"return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
)


# The last position bounds the windows that can be detected. A chunk size would have to
# divide all differences to be mistaken for a window.
_POSITIONS = (5, 4_099, 131_101, 1_100_003)


class UnsupportedMaskError(UnsupportedModelError):
    """A model's mask is neither causal nor a causal sliding window."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        index: Index in the order in which layers run.
        window: Number of tokens that a token attends to, itself included; None for all.
        shape: Shape of the keys and values of a token.
        queries_per_head: Number of query heads per key head.
        softcap: Upper bound of the scores, by a hyperbolic tangent; None for no bound.
        sinks: Whether the heads have attention sinks.
    """

    index: int
    window: int | None
    shape: LayerShape
    queries_per_head: int
    softcap: float | None
    sinks: bool


Attend = Callable[
    [
        AttentionLayer,
        tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        float,
        torch.Tensor | None,
    ],
    torch.Tensor,
]
"""Attention function of a pass over one sequence, without a mask.

Its arguments are the layer; queries, keys and values, `(heads, tokens, width)`; the factor of
the products of queries and keys; and attention sinks, a score for each query head, or None. It
returns `(tokens, query heads, width)`."""


class AttentionLayout:
    """The attention layers of one model, and passes with another attention function."""

    def __init__(self, model: torch.nn.Module, layers: dict[torch.nn.Module, AttentionLayer]):
        self._model, self._layers = model, layers
        self._configs = _configs(model)

    @property
    def layers(self) -> Sequence[AttentionLayer]:
        """All layers in order."""
        return list(self._layers.values())

    def compute_logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        results: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Run the model over tokens as one sequence, without a mask.

        Args:
            tokens: Token ids, shape `(t,)`.
            positions: Positions of the tokens, shape `(t,)`.
            results: Indices of the tokens whose logits are requested, shape `(r,)`.
            attend: Attention function of the pass.

        Returns:
            Logits, shape `(r, width)`, on the device of the model's output.
        """
        inputs = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "return_dict": True,
        }
        _active.layers, _active.attend = self._layers, attend
        try:
            with _attention_function(self._configs, _ATTENTION):
                return compute_logits(self._model, inputs, 0, results)
        finally:
            del _active.layers, _active.attend


def register() -> None:
    """Register the attention functions, and masks of the recording one, with transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    ALL_ATTENTION_FUNCTIONS.register(_RECORDING_ATTENTION, _record_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_RECORDING_ATTENTION, _record_mask)


def read_layout(model: torch.nn.Module, forward: Callable[[], object]) -> AttentionLayout:
    """Return the attention layers that a forward pass uses.

    Args:
        model: A transformers model.
        forward: Runs it on a few tokens of one sequence, with mask, without cache.

    Raises:
        UnsupportedModelError: The attention differs from a plain decoder's in a way that
            the packed attention does not support.
    """
    configs = _configs(model)
    if not configs:
        raise UnsupportedModelError(f"none of its configs has the attribute {_ATTRIBUTE}")
    implementations = {getattr(config, _ATTRIBUTE) for config in configs}
    recorder = _active.recorder = _Recorder(eager=implementations != {"sdpa"})
    try:
        with _attention_function(configs, _RECORDING_ATTENTION):
            forward()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"with another attention function its forward pass raises {describe_error(error)}"
        ) from error
    finally:
        _active.recorder = None
    return AttentionLayout(model, recorder.layers)


class _Recorder:
    """The layers of one forward pass and their arguments."""

    def __init__(self, *, eager: bool) -> None:
        self.layers: dict[torch.nn.Module, AttentionLayer] = {}
        self._eager = eager
        self._windows: dict[float, int | None] = {}

    def add_mask(self, window: int | None) -> float:
        """Return a value that fills a mask and identifies its window on any device."""
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
            raise UnsupportedModelError("an attention layer runs twice in a forward pass")
        if query.shape[2] != key.shape[2] or query.shape[0] != 1:
            raise UnsupportedModelError(
                "an attention layer attends to other tokens than its own"
            )
        self._check_arguments(module, arguments)
        sinks = arguments.get("s_aux") if self._eager else None
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise UnsupportedModelError(
                f"its attention sinks have the shape {tuple(sinks.shape)}"
            )
        self.layers[module] = AttentionLayer(
            index=len(self.layers),
            window=self._window(mask, arguments),
            shape=LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device),
            queries_per_head=query.shape[1] // key.shape[1],
            softcap=arguments.get("softcap") if self._eager else None,
            sinks=sinks is not None,
        )

    def _check_arguments(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        if not arguments.get("is_causal", getattr(module, "is_causal", True)):
            raise UnsupportedModelError("an attention layer is not causal")
        # transformers' sdpa ignores unknown arguments; a model's own eager function may not.
        decisive = None if self._eager else {"position_bias", "cache"}
        for name, value in arguments.items():
            if value is None or name in _KNOWN_ARGUMENTS:
                continue
            if decisive is None or name in decisive:
                raise UnsupportedModelError(f"its attention has an argument {name!r}")

    def _window(self, mask: torch.Tensor | None, arguments: dict[str, Any]) -> int | None:
        if mask is None:
            if arguments.get("sliding_window") is not None:
                raise UnsupportedModelError(
                    "an attention layer has a sliding window without a mask"
                )
            return None
        marks = torch.unique(mask).tolist()
        if len(marks) != 1 or marks[0] not in self._windows:
            raise UnsupportedMaskError("an attention layer computes its own mask")
        window = self._windows[marks[0]]
        if window == 0:  # Qwen2-MoE makes such a mask for layers that may be absent
            raise UnsupportedMaskError("an attention layer has a mask that hides every token")
        return window


class _Active(threading.local):
    """State of the forward pass that runs on this thread."""

    recorder: _Recorder | None = None
    layers: dict[torch.nn.Module, AttentionLayer]
    attend: Attend


_active = _Active()


def _attention(  # noqa: PLR0917 - as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `(1, heads, tokens, width)`; return `(1, tokens, heads, width)`.

    `s_aux` is transformers' name of attention sinks. The other keyword arguments were
    checked when the layout was read.
    """
    assert attention_mask is None  # noqa: S101 - our own mistake
    layer = _active.layers[module]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = s_aux if layer.sinks else None
    return _active.attend(layer, (query[0], key[0], value[0]), scale, sinks)[None], None


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
    mark = _active.recorder.add_mask(window_of(mask_function))
    size = (batch_size, 1, q_length, kv_length)
    return torch.full(size, mark, dtype=torch.float32, device=device)


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the configs from which modules read the name of their attention function."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, _ATTRIBUTE):
            configs[id(config)] = config
    return list(configs.values())


@contextmanager
def _attention_function(configs: Sequence[Any], name: str) -> Iterator[None]:
    implementations = [getattr(config, _ATTRIBUTE) for config in configs]
    try:
        for config in configs:
            setattr(config, _ATTRIBUTE, name)
        yield
    finally:
        for config, implementation in zip(configs, implementations, strict=True):
            setattr(config, _ATTRIBUTE, implementation)


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return how many tokens a token attends to, itself included; None for all, 0 for none.

    Args:
        mask_function: Function of `(batch, head, query position, key position)` that returns
            whether the key is visible to the query, as in `transformers.masking_utils`.

    Raises:
        UnsupportedMaskError: The mask is not a sliding window (later tokens, blocks, chunks).
    """
    counts = [_visible_count(mask_function, position) for position in _POSITIONS]
    window = counts[-1]
    expected = [min(position + 1, window) for position in _POSITIONS]
    if counts != expected:
        raise UnsupportedMaskError(
            f"one of its masks is unknown: tokens at positions {_POSITIONS} see {counts} "
            f"tokens, which is not a sliding window"
        )
    return None if window > _POSITIONS[-1] else window


def _visible_count(mask_function: Callable[..., Any], position: int) -> int:
    """Return how many consecutive tokens up to `position` its token attends to."""
    keys = torch.arange(position + 3)
    zero = torch.zeros((), dtype=torch.long)
    try:
        visible = mask_function(zero, zero, torch.tensor(position), keys)
        visible = torch.as_tensor(visible).expand(keys.shape).bool()
    except Exception as error:
        raise UnsupportedMaskError(
            f"one of its masks is unknown: it cannot be evaluated at single positions: {error}"
        ) from error
    count = int(visible.sum())
    first = position + 1 - count
    if not bool(visible[first : position + 1].all()):
        raise UnsupportedMaskError(
            f"one of its masks is unknown: the token at position {position} sees later tokens "
            f"or gaps"
        )
    return count
