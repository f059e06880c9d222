"""`families`: tiny random models of the families of decoder-only models that engines serve.

A family is an architecture in one variant: a kind of position encoding, attention window,
expert layer or recurrent state. Windows have 4 or 16 tokens and rotary embeddings are scaled
beyond 16 positions, so that a sequence of 60 tokens exceeds all of them.
`genlm.testing.family_settings` lists the configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from genlm.testing.family_settings import Sizes, attention, experts, positions, recurrent

# One or two families per mechanism; `make test` runs them on every engine.
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
        name: The architecture and, after a space, the variant.
        model_type: transformers' name of the architecture.
        settings: All settings of the config; read-only.
        hidden_size: Width of the model; it determines the scale of its random weights.
        representative: Whether the family is in the third that covers every mechanism.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any]
    hidden_size: int
    representative: bool


def families(head_dim: int = 16) -> dict[str, Family]:
    """Return the families, by name.

    Args:
        head_dim: Width of an attention head, a multiple of 8; kernels support some widths only.
            A model has four heads, so its width is `4 * head_dim`.

    Returns:
        The same families for every `head_dim`. `TinyModel.of` builds the model of one.

    Raises:
        ValueError: `head_dim` is not a positive multiple of 8.
    """
    if head_dim < 8 or head_dim % 8:
        raise ValueError(f"head_dim={head_dim!r}; use a positive multiple of 8")
    sizes = Sizes(head_dim)
    configs = attention(sizes) | positions(sizes) | experts(sizes) | recurrent(sizes)
    return {
        name: Family(
            name,
            name.partition(" ")[0],
            MappingProxyType(settings),
            sizes.hidden,
            name in _REPRESENTATIVE,
        )
        for name, settings in configs.items()
    }
