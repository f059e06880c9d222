"""Tokenizers and their special tokens, loaded as by the harness's model `hf`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

_NEEDED = ("encode", "decode", "bos_token_id", "eos_token_id", "name_or_path")


def load_tokenizer(
    default: Any, tokenizer: Any, add_bos_token: bool | None, **options: Any
) -> Any:
    """Return the tokenizer of a `GenlmLM`.

    Args:
        default: Tokenizer of the engine.
        tokenizer: Name, folder or object of another tokenizer; None for the engine's.
        add_bos_token: Option of the tokenizer if it is loaded by name.
        **options: Options of `AutoTokenizer.from_pretrained`.

    Raises:
        TypeError: The tokenizer lacks methods of transformers tokenizers.
    """
    if tokenizer is None:
        tokenizer = default
        if add_bos_token is not None:  # some classes read it only in their constructor
            tokenizer = getattr(default, "name_or_path", None) or default
    if add_bos_token is not None:
        options["add_bos_token"] = add_bos_token
    if isinstance(tokenizer, str):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer, **options)
    missing = [name for name in _NEEDED if not hasattr(tokenizer, name)]
    if missing:
        raise TypeError(
            f"{type(tokenizer).__name__} has no {', '.join(missing)}; the harness needs a "
            f"tokenizer of transformers: pass tokenizer= with its name or folder"
        )
    return tokenizer


def ending_ids(tokenizer: Any, **options: Any) -> frozenset[int]:
    """Return the ids at which transformers' `generate` ends a text of this checkpoint.

    These are the EOS ids of its generation_config.json, or else of its config.json, and the EOS
    id of the tokenizer.
    """
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    for config_class in (GenerationConfig, AutoConfig):
        try:
            eos = config_class.from_pretrained(tokenizer.name_or_path, **options).eos_token_id
        except (OSError, ValueError, AttributeError):  # a tokenizer without a model
            continue
        ids.update(eos if isinstance(eos, Iterable) else () if eos is None else (eos,))
        break
    return frozenset(ids)
