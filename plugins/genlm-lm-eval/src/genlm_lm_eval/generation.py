"""`GenerationOptions`: the generation arguments of the harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

# Options of transformers' `generate` that tasks set to their neutral values.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "min_p": (0.0, None),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1.0,),
    "use_cache": (True, False),
}


@dataclass(frozen=True)
class GenerationOptions:
    """Generation options of a request of the harness.

    Attributes:
        until: Stop texts; the continuation ends before the first one.
        max_tokens: Maximum number of generated ids.
        sampling: Temperature and limits of the draws, by the names of `AsyncLM.batch_sample`.
    """

    until: tuple[str, ...]
    max_tokens: int
    sampling: Mapping[str, Any]

    @classmethod
    def of(
        cls, gen_kwargs: Mapping[str, Any], *, max_tokens: int, eos: str | None
    ) -> GenerationOptions:
        """Read the arguments of a request.

        Args:
            gen_kwargs: Arguments of the task and of `--gen_kwargs`.
            max_tokens: Default for requests without a limit.
            eos: Text of the EOS token, which is always a stop text.

        Raises:
            ValueError: An unsupported argument would change the continuation, a stop text is
                empty, or the maximum number of tokens is less than 1.
        """
        arguments = dict(normalize_gen_kwargs(dict(gen_kwargs), max_tokens))
        until = arguments.pop("until")
        if "" in until:
            raise ValueError(
                f"until={until!r} has an empty text, at which the harness's model hf ends each "
                f"continuation after one token; leave it out, or set max_gen_toks=1"
            )
        until = handle_stop_sequences(until, eos=eos)
        limit: int = arguments.pop("max_gen_toks")
        draws: bool = arguments.pop("do_sample")
        temperature = float(arguments.pop("temperature", 0.0))
        limits = {name: arguments.pop(name, None) for name in ("top_k", "top_p", "min_p")}
        if limits["top_k"] is not None:  # 0 and negative numbers stand for no limit
            limits["top_k"] = max(0, int(limits["top_k"])) or None
        unsupported = [
            name
            for name, value in arguments.items()
            if name not in _WITHOUT_EFFECT or value not in _WITHOUT_EFFECT[name]
        ]
        if unsupported:
            raise ValueError(
                f"generation arguments {sorted(unsupported)} are not supported; supported are "
                f"until, max_gen_toks, do_sample, temperature, top_k, top_p and min_p"
            )
        if limit < 1:
            raise ValueError(f"max_gen_toks={limit}; it must be at least 1")
        return cls(
            until=tuple(text for text in until if text),
            max_tokens=limit,
            sampling={"temperature": temperature if draws else 0.0, **limits},
        )
