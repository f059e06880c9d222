"""Continuations of many prompts, token by token, each until its own stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

if TYPE_CHECKING:
    from genlm import AsyncLM, Context

__all__ = ["Continuation", "GenerationOptions", "continue_all", "lookback_tokens"]

# Options of transformers' `generate` that tasks name with the value that changes nothing.
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
"""Tokens before the usual encoding of a stop text in which it is looked for; the harness's
model `hf` takes as many, since a text has several encodings."""


@dataclass(frozen=True)
class GenerationOptions:
    """What a request of the harness says of its continuation.

    Attributes:
        until: Texts before which the continuation ends.
        max_tokens: The most ids to generate.
        temperature: 0 takes the most likely token.
        top_k: Draw from the k most likely tokens.
        top_p: Draw from the fewest most likely tokens that have this share.
    """

    until: tuple[str, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def of(
        cls, gen_kwargs: Mapping[str, Any], *, max_tokens: int, eos: str | None
    ) -> GenerationOptions:
        """Read the arguments of a request.

        Args:
            gen_kwargs: As tasks and `--gen_kwargs` have them.
            max_tokens: For requests that say nothing.
            eos: The text of the end-of-sequence token, which always ends a continuation.

        Raises:
            ValueError: An argument that would change the continuation is not known here, or no
                token may be generated.
        """
        known = dict(normalize_gen_kwargs(dict(gen_kwargs), max_tokens))
        until = handle_stop_sequences(known.pop("until"), eos=eos)
        limit: int = known.pop("max_gen_toks")
        draws: bool = known.pop("do_sample")
        temperature = float(known.pop("temperature", 0.0))
        top_k, top_p = known.pop("top_k", None), known.pop("top_p", None)
        unknown = [
            name
            for name, value in known.items()
            if name not in _WITHOUT_EFFECT or value not in _WITHOUT_EFFECT[name]
        ]
        if unknown:
            raise ValueError(
                f"generation arguments {sorted(unknown)} are not supported; supported are "
                f"until, max_gen_toks, do_sample, temperature, top_k and top_p"
            )
        if limit < 1:
            raise ValueError(f"max_gen_toks={limit}; it must be at least 1")
        return cls(
            until=tuple(text for text in until if text),
            max_tokens=limit,
            temperature=temperature if draws else 0.0,
            top_k=int(top_k) if top_k is not None and int(top_k) > 0 else None,
            top_p=None if top_p is None else float(top_p),
        )

    @property
    def drawing(self) -> tuple[float, int | None, float | None]:
        """What requests of one call must have in common."""
        return self.temperature, self.top_k, self.top_p


@dataclass(eq=False)
class Continuation:
    """A prompt and what was generated after it.

    Attributes:
        place: Of the request among all.
        context: Prompt and generated ids.
        options: Of the request.
        seed: Of its draws.
        lookback: The number of last ids in whose text stop texts are looked for.
        token_ids: What was generated.
    """

    place: int
    context: Context
    options: GenerationOptions
    seed: int
    lookback: int
    token_ids: list[int] = field(default_factory=list)

    def add(self, token_id: int) -> None:
        """Append what was drawn."""
        self.token_ids.append(token_id)
        self.context = self.context.extend(token_id)


def lookback_tokens(tokenizer: Any, until: Sequence[str]) -> int:
    """Return how many last tokens can contain the end of a stop text."""
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
    """Generate continuations whose options draw in the same way.

    Each step asks for one token of each unfinished continuation, in one call. A finished one
    makes room for the next at once.

    Args:
        llm: The model.
        tokenizer: Decodes ids, to find stop texts.
        continuations: Without generated ids.
        ending: Ids that end a continuation; they are its last.
        at_once: The most continuations that are generated at a time.

    Yields:
        Each continuation when it is finished.
    """
    waiting = list(reversed(continuations))
    active: list[Continuation] = []
    while waiting or active:
        while waiting and len(active) < at_once:
            active.append(waiting.pop())
        temperature, top_k, top_p = active[0].options.drawing
        drawn = llm.batch_draw_sync(
            [each.context for each in active],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=[each.seed for each in active],
        )
        for each, token in zip(active, drawn, strict=True):
            each.add(token.token_id)
        tails = tokenizer.batch_decode([each.token_ids[-each.lookback :] for each in active])
        unfinished = []
        for each, tail in zip(active, tails, strict=True):
            if _is_finished(each, tail, ending):
                yield each
            else:
                unfinished.append(each)
        active = unfinished


def _is_finished(continuation: Continuation, tail: str, ending: frozenset[int]) -> bool:
    ids, options = continuation.token_ids, continuation.options
    return (
        len(ids) >= options.max_tokens
        or ids[-1] in ending
        or any(text in tail for text in options.until)
    )
