"""`families`: tiny random models of every family of decoder-only models that engines serve.

A family is an architecture in one of its variants: a kind of position encoding, of attention
window, of expert layers, of recurrent state. Windows are of 4 or 16 tokens and scaled rotary
embeddings start from 16 positions, so that a sequence of 60 tokens is beyond all of them.
`genlm.testing.family_settings` lists the configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from genlm.testing.family_settings import Sizes, attention, experts, positions, recurrent

__all__ = ["Family", "families"]

# One or two for each mechanism; what `make test` runs on every engine.
_REPRESENTATIVE = frozenset(
    {
        "bloom",
        "cohere2",
        "deepseek_v3",
        "falcon with grouped heads",
        "gemma2 with a window of 16",
        "gemma2 with capped scores",
        "gemma3_text with linear rope",
        "gemma3_text with a window of 16",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "jamba",
        "lfm2",
        "llama",
        "llama with dynamic rope",
        "llama with linear rope",
        "llama with llama3 rope",
        "llama with the tokenizer's vocabulary",
        "llama with tied embeddings",
        "llama with yarn rope",
        "llama4_text with chunks of 16",
        "mamba",
        "mamba2",
        "mistral with a window of 16",
        "mixtral",
        "mpt",
        "opt",
        "phi3 with longrope",
        "qwen2 with a window of 16",
        "qwen3",
        "recurrent_gemma",
        "rwkv",
        "stablelm",
    }
)


@dataclass(frozen=True)
class Family:
    """A tiny model of an architecture in one of its variants.

    Attributes:
        name: The architecture, and what is special about this variant.
        model_type: transformers' name of the architecture.
        settings: All settings of the config; read-only.
        hidden_size: Width of the model, by which the size of its random weights is chosen.
        representative: Whether it is one of the third that covers every mechanism.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any]
    hidden_size: int
    representative: bool


def families(head_dim: int = 16) -> dict[str, Family]:
    """List the families, by name.

    Args:
        head_dim: Width of an attention head, a multiple of 8; kernels serve some widths only.
            A model has four heads and is four heads wide.

    Returns:
        The families, the same ones for every `head_dim`. Build one with `TinyModel.of`.

    Raises:
        ValueError: `head_dim` is no positive multiple of 8.
    """
    if head_dim < 8 or head_dim % 8:
        raise ValueError(f"head_dim={head_dim!r}; use a positive multiple of 8")
    sizes = Sizes(head_dim)
    listed = attention(sizes) | positions(sizes) | experts(sizes) | recurrent(sizes)
    return {
        name: Family(
            name,
            model_type,
            MappingProxyType(settings),
            sizes.hidden,
            name in _REPRESENTATIVE,
        )
        for name, (model_type, settings) in listed.items()
    }
