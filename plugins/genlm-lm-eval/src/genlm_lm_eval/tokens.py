"""Tokenizers and their special tokens, loaded as by the harness's model `hf`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

__all__ = ["ending_ids", "load_tokenizer"]

_NEEDED = ("encode", "decode", "batch_decode", "bos_token_id", "eos_token_id", "name_or_path")


def load_tokenizer(own: Any, given: Any, add_bos_token: bool | None, **options: Any) -> Any:
    """Return the tokenizer that texts are encoded with.

    Args:
        own: Tokenizer of the engine.
        given: Name, folder or object of another tokenizer; None for the engine's.
        add_bos_token: Option of the tokenizer if it is loaded by name.
        **options: Options of `AutoTokenizer.from_pretrained`.

    Raises:
        TypeError: The tokenizer lacks methods of transformers tokenizers.
    """
    tokenizer = own if given is None else given
    if add_bos_token is not None:
        options["add_bos_token"] = add_bos_token
        if given is None:  # some classes take the setting when they are made only
            tokenizer = getattr(own, "name_or_path", None) or own
    if isinstance(tokenizer, str):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer, **options)
    lacking = [name for name in _NEEDED if not hasattr(tokenizer, name)]
    if lacking:
        raise TypeError(
            f"{type(tokenizer).__name__} has no {', '.join(lacking)}; the harness needs a "
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
            found = config_class.from_pretrained(tokenizer.name_or_path, **options).eos_token_id
        except (OSError, ValueError, AttributeError):  # the tokenizer came without a model
            continue
        ids.update(found if isinstance(found, Iterable) else () if found is None else (found,))
        break
    return frozenset(ids)
