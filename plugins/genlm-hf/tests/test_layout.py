"""The attention layers of a model, and what the packed attention refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from genlm.prefix import UnsupportedModelError
from genlm_hf.packed.layout import AttentionLayer, read_layout, register
from genlm_hf.storage import LayerShape

TOKENS = 3


class Attention(torch.nn.Module):
    is_causal = True


class Decoder(torch.nn.Module):
    """Two layers, of which a pass calls the attention function as models of transformers do."""

    def __init__(self, implementation: str = "sdpa") -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation_internal=implementation)
        self.attentions = torch.nn.ModuleList([Attention(), Attention()])

    def attend(
        self,
        layer: int,
        mask: torch.Tensor | None = None,
        *,
        batch: int = 1,
        keys: int = TOKENS,
        **arguments: Any,
    ) -> None:
        query = torch.zeros(batch, 4, TOKENS, 8)
        states = query, torch.zeros(batch, 2, keys, 8), torch.zeros(batch, 2, keys, 6)
        name = self.config._attn_implementation_internal
        output, _ = ALL_ATTENTION_FUNCTIONS[name](
            self.attentions[layer], *states, mask, **arguments
        )
        assert output.shape == (batch, TOKENS, 4, 6)

    def mask(self, function: Callable[..., Any]) -> torch.Tensor:
        """The mask that transformers makes from a function of two positions."""
        make = ALL_MASK_ATTENTION_FUNCTIONS[self.config._attn_implementation_internal]
        mask: torch.Tensor = make(1, TOKENS, TOKENS, mask_function=function)
        return mask


def layers_of(model: Decoder, run: Callable[[Decoder], object]) -> list[AttentionLayer]:
    register()
    return list(read_layout(model, lambda: run(model)).layers)


def window(size: int) -> Callable[..., Any]:
    sliding = masking_utils.sliding_window_overlay(size)
    function: Callable[..., Any] = masking_utils.and_masks(
        masking_utils.causal_mask_function, sliding
    )
    return function


def test_layers_have_their_order_shapes_and_windows() -> None:
    def run(model: Decoder) -> None:
        windowed, causal = (
            model.mask(window(8)),
            model.mask(masking_utils.causal_mask_function),
        )
        model.attend(1, windowed, sliding_window=8)
        model.attend(0, causal, softcap=30.0, foo=1)

    shape = LayerShape(2, 8, 6, torch.float32, torch.device("cpu"))
    assert layers_of(Decoder(), run) == [
        AttentionLayer(0, 8, shape, 2, None, sinks=False),
        AttentionLayer(1, None, shape, 2, None, sinks=False),  # sdpa ignores the soft cap
    ]


def test_soft_caps_and_sinks_are_those_of_attention_functions_that_apply_them() -> None:
    def run(model: Decoder) -> None:
        model.attend(0, softcap=30.0, unknown=None)
        model.attend(1, s_aux=torch.zeros(4))

    first, second = layers_of(Decoder("eager"), run)
    assert (first.softcap, first.sinks) == (30.0, False)
    assert (second.softcap, second.sinks) == (None, True)
    first, second = layers_of(Decoder("sdpa"), run)
    assert (first.softcap, second.sinks) == (None, False)


REFUSED: dict[str, tuple[str, Callable[[Decoder], object], str]] = {
    "a layer that runs twice": (
        "sdpa",
        lambda model: (model.attend(0), model.attend(0)),
        "an attention layer runs twice",
    ),
    "keys of other tokens": (
        "sdpa",
        lambda model: model.attend(0, keys=TOKENS + 1),
        "attends to other tokens than its own",
    ),
    "several sequences": (
        "sdpa",
        lambda model: model.attend(0, batch=2),
        "attends to other tokens than its own",
    ),
    "later tokens": (
        "sdpa",
        lambda model: model.attend(0, is_causal=False),
        "an attention layer is not causal",
    ),
    "a bias of positions": (
        "sdpa",
        lambda model: model.attend(0, position_bias=torch.zeros(1)),
        "has an argument 'position_bias'",
    ),
    "an argument of a model's own function": (
        "eager",
        lambda model: model.attend(0, foo=1),
        "has an argument 'foo'",
    ),
    "sinks of another shape": (
        "eager",
        lambda model: model.attend(0, s_aux=torch.zeros(2)),
        r"attention sinks have the shape \(2,\)",
    ),
    "a window without a mask": (
        "sdpa",
        lambda model: model.attend(0, sliding_window=8),
        "a sliding window without a mask",
    ),
    "its own mask": (
        "sdpa",
        lambda model: model.attend(0, torch.zeros(1, 1, TOKENS, TOKENS)),
        "computes its own mask",
    ),
    "two masks": (
        "sdpa",
        lambda model: model.attend(
            0, torch.cat([model.mask(window(8)), model.mask(window(9))], dim=2)
        ),
        "computes its own mask",
    ),
    "a mask that hides every token": (
        "sdpa",
        lambda model: model.attend(0, model.mask(lambda *_: torch.tensor(False))),
        "a mask that hides every token",
    ),
    "an error": ("sdpa", lambda _: 1 / 0, "its forward pass raises ZeroDivisionError"),
}


@pytest.mark.parametrize(
    ("implementation", "run", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_attention_that_is_not_that_of_a_plain_decoder_is_refused(
    implementation: str, run: Callable[[Decoder], object], message: str
) -> None:
    model = Decoder(implementation)
    with pytest.raises(UnsupportedModelError, match=message):
        layers_of(model, run)
    assert model.config._attn_implementation_internal == implementation


def test_a_layer_that_is_not_causal_is_refused() -> None:
    model = Decoder()
    model.attentions[0].is_causal = False
    with pytest.raises(UnsupportedModelError, match="an attention layer is not causal"):
        layers_of(model, lambda model: model.attend(0))
    assert len(layers_of(model, lambda model: model.attend(0, is_causal=True))) == 1
