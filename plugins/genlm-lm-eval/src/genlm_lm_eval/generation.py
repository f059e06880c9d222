"""Generation of many continuations token by token, with a stop condition per continuation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

if TYPE_CHECKING:
    from genlm import AsyncLM, Context

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

_LOOKBACK_TOKENS = 2
"""Number of tokens that are searched for a stop text in addition to its usual encoding, since a
text has several encodings; as in the harness's model `hf`."""


@dataclass(frozen=True)
class GenerationOptions:
    """Generation options of a request of the harness.

    Attributes:
        until: Stop texts; the continuation ends before the first one.
        max_tokens: Maximum number of generated ids.
        sampling: Temperature and limits of the draws, by the names of `AsyncLM.batch_draw`;
            equal for all continuations of `continue_all`.
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
            ValueError: An unsupported argument would change the continuation, or the maximum
                number of tokens is less than 1.
        """
        arguments = dict(normalize_gen_kwargs(dict(gen_kwargs), max_tokens))
        until = handle_stop_sequences(arguments.pop("until"), eos=eos)
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


@dataclass(eq=False)
class Continuation:
    """A prompt and the ids generated after it.

    Attributes:
        place: Index of the request in the call of the harness.
        context: Prompt and generated ids.
        options: Generation options of the request.
        seed: Random seed of its draws.
        lookback: Number of last ids whose text is searched for stop texts.
        token_ids: The generated ids.
    """

    place: int
    context: Context
    options: GenerationOptions
    seed: int
    lookback: int
    token_ids: list[int] = field(default_factory=list)

    def add(self, token_id: int) -> None:
        """Append a drawn token."""
        self.token_ids.append(token_id)
        self.context = self.context.extend(token_id)


def lookback_tokens(tokenizer: Any, until: Sequence[str]) -> int:
    """Return the number of last tokens that can contain the end of a stop text."""
    lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in until]
    return max(lengths, default=0) + _LOOKBACK_TOKENS


def continue_all(
    llm: AsyncLM,
    tokenizer: Any,
    continuations: Sequence[Continuation],
    ending: frozenset[int],
    *,
    at_once: int,
) -> Iterator[Continuation]:
    """Generate continuations with equal sampling options.

    Each step draws one token for every unfinished continuation in one call. The next waiting
    continuation replaces a finished one in the following step.

    Args:
        llm: The model.
        tokenizer: Decodes ids, to find stop texts.
        continuations: Continuations without generated ids.
        ending: Ids that end a continuation and are included in it.
        at_once: Maximum number of concurrent continuations.

    Yields:
        Each continuation when it is finished.
    """
    waiting = list(reversed(continuations))
    active: list[Continuation] = []
    while waiting or active:
        while waiting and len(active) < at_once:
            active.append(waiting.pop())
        drawn = llm.batch_draw_sync(
            [continuation.context for continuation in active],
            **active[0].options.sampling,
            seed=[continuation.seed for continuation in active],
        )
        for continuation, token in zip(active, drawn, strict=True):
            continuation.add(token.token_id)
        tails = tokenizer.batch_decode([c.token_ids[-c.lookback :] for c in active])
        unfinished = []
        for continuation, tail in zip(active, tails, strict=True):
            if _is_finished(continuation, tail, ending):
                yield continuation
            else:
                unfinished.append(continuation)
        active = unfinished


def _is_finished(continuation: Continuation, tail: str, ending: frozenset[int]) -> bool:
    ids, options = continuation.token_ids, continuation.options
    return (
        len(ids) >= options.max_tokens
        or ids[-1] in ending
        or any(text in tail for text in options.until)
    )
