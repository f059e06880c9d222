"""`GenlmLM`: models of genlm for lm-evaluation-harness.

Encoding, windows, truncation and special tokens are those of the harness's model `hf`, so that
both compute the same numbers. Engines batch the requests.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry, register_model
from lm_eval.models.utils import DEFAULT_MAX_LENGTH, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import genlm
from genlm_lm_eval.generation import GenerationOptions
from genlm_lm_eval.tokens import ending_ids, load_tokenizer

if TYPE_CHECKING:
    import os

    from lm_eval.api.instance import Instance

_logger = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 512
"""Number of texts per call of `batch_token_scores`. The progress bar and the harness's cache of
results are updated between calls."""

_DEFAULT_DEVICE = "cuda:0"
"""Device that the command of the harness passes by default."""

_PEFT = "peft"
"""The name under which the adapter of the option `peft` is loaded."""

ScoredRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""Cache key of a request in the harness, ids of the context, ids of the continuation."""


class GenlmLM(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
    """A model of genlm for lm-evaluation-harness, under the name `genlm`.

    One process evaluates all requests (`rank` 0 of `world_size` 1), because engines distribute
    their work themselves. All methods block, so do not call them from coroutines.

    Args:
        pretrained: Model id or path, or a loaded model.
        backend: Name of an engine, see `genlm plugins`; by default the engine that
            `genlm.load_model` chooses.
        tokenizer: Name, folder or object of a tokenizer of transformers; by default the
            engine's.
        max_length: Maximum context length in tokens; by default the engine's `max_context`, or
            2048 if it has no limit. Longer texts are truncated on the left.
        max_gen_toks: Maximum number of generated tokens of tasks without this setting.
        add_bos_token: Whether texts begin with the BOS token; the default is the tokenizer's
            setting.
        prefix_token_id: Id of the token before texts without a context; by default the BOS
            token of the tokenizer, or else its EOS token.
        peft: Folder of a LoRA adapter.
        think_end_token: Text or id of the token at which reasoning ends; the text up to it is
            removed from results.
        enable_thinking: Passed to the chat template.
        chat_template_args: Further arguments of the chat template.
        texts_at_once: Number of texts per scoring call, and of concurrent continuations.
        batch_size: Ignored. The harness always passes it, but engines batch requests
            themselves.
        max_batch_size: Maximum number of concurrent queries in the engine; None for no limit.
        device: Passed to the engine, except for the harness's default `cuda:0`, with which the
            engine chooses the device.
        **engine_options: Options of `genlm.load_model`.

    Raises:
        TypeError: Engine options were passed with a loaded model, or the tokenizer lacks
            methods that the harness needs.
        ValueError: `max_length` exceeds the engine's maximum, `enable_thinking` was passed
            without `think_end_token`, or there is no prefix token.
        GenlmError: Errors of `genlm.load_model`.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | genlm.AsyncLM,
        backend: str | None = None,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        peft: str | os.PathLike[str] | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        texts_at_once: int = _TEXTS_AT_ONCE,
        batch_size: int | str | None = None,  # noqa: ARG002
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        if enable_thinking and think_end_token is None:
            raise ValueError("enable_thinking=True requires think_end_token")
        if max_batch_size is not None:
            engine_options["max_batch_size"] = max_batch_size
        if device not in (None, _DEFAULT_DEVICE):
            engine_options["device"] = device
        self.llm = _load(pretrained, backend, engine_options)
        if peft is not None:
            self.llm.load_lora(peft, _PEFT)
            self.llm = self.llm.with_lora(_PEFT)
        remote = {k: v for k, v in engine_options.items() if k == "trust_remote_code"}
        self.tokenizer = load_tokenizer(self.llm.tokenizer, tokenizer, add_bos_token, **remote)
        self.max_length = _resolve_max_length(max_length, self.llm.max_context)
        self.max_gen_toks = int(max_gen_toks)
        self._add_bos_token = add_bos_token
        self.think_end_token = _parse_token(think_end_token)
        self.enable_thinking = enable_thinking
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.chat_template_args = {**(chat_template_args or {}), **thinking}
        self.texts_at_once = int(texts_at_once)
        self._prefix_token_id = prefix_token_id
        if self.prefix_token_id is None:
            raise ValueError(
                "the tokenizer has neither a beginning-of-text nor an end-of-text token; pass "
                "prefix_token_id= with the token that comes before texts without a context"
            )
        self._ending = ending_ids(self.tokenizer, **remote)

    def close(self) -> None:
        """Close the model, even if it was passed as an object."""
        self.llm.close()

    # -- properties of the model -------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        """The id of the end-of-text token."""
        eot: int | None = self.tokenizer.eos_token_id
        return eot

    @property
    def prefix_token_id(self) -> int | None:
        """Id of the token before texts without a context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which the harness uses as a key of its request cache."""
        name: str = self.tokenizer.name_or_path
        return name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return model information for the harness's results file."""
        return {
            "genlm_version": genlm.__version__,
            "genlm_engine": self.llm.name,
            "genlm_max_length": self.max_length,
        }

    # -- tokens -----------------------------------------------------------------------

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, as the harness's model `hf` does.

        Args:
            string: The text.
            add_special_tokens: Whether the tokenizer adds its special tokens. None applies the
                tokenizer's default and `add_bos_token`, and adds none if the text begins
                with the prefix token.
        """
        if add_special_tokens is None:
            return self._ids(string, self.tokenizer.decode([self.prefix_token_id]))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def _ids(self, text: str, special: str | None) -> list[int]:
        """Return the ids of a text, without added tokens if the text begins with `special`."""
        options: dict[str, bool] = {}
        if special is not None and text.startswith(special):
            options["add_special_tokens"] = False
        elif self._add_bos_token is not None:
            options["add_special_tokens"] = self._add_bos_token
        ids: list[int] = self.tokenizer.encode(text, **options)
        return ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, formatted by the tokenizer's template.

        If the template rejects the conversation, it is applied without the system messages.
        """

        def apply(messages: list[dict[str, str]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self.chat_template_args,
            )
            return text

        try:
            return apply(chat_history)
        except TemplateError:
            _logger.warning("the chat template failed; system messages are omitted")
            return apply([message for message in chat_history if message["role"] != "system"])

    # -- log-likelihoods --------------------------------------------------------------

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation and whether it is the greedy one.

        A context without tokens, which the harness's model `hf` refuses, is replaced by the
        prefix token. An empty continuation has log-probability 0.

        Raises:
            ValueError: The model was loaded with `enable_thinking`, or the tokenizer encodes a
                continuation as a part of the last token of its context.
        """
        if self.enable_thinking:
            raise ValueError(
                "enable_thinking=True requires tasks that generate; this one scores"
            )
        # The harness raises IndexError if both texts have no tokens.
        has_tokens = [
            bool(context or self.tok_encode(continuation, add_special_tokens=False))
            for context, continuation in (request.args for request in requests)
        ]
        results = iter(
            super().loglikelihood(
                [*itertools.compress(requests, has_tokens)], disable_tqdm=disable_tqdm
            )
        )
        return [next(results) if has else (0.0, True) for has in has_tokens]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows of `max_length` tokens."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        scored = iter(
            self._loglikelihood_tokens(
                [window for text in windows for window in text], disable_tqdm=disable_tqdm
            )
        )
        totals = []
        for request, text in zip(requests, windows, strict=True):
            total = sum((next(scored)[0] for _ in text), start=0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            totals.append(total)
        return totals

    def _windows(self, text: str) -> Iterator[ScoredRequest]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        for context, continuation in map(make_disjoint_window, windows):
            yield None, context, continuation

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoredRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations, sorted so that common prefixes are in one call."""
        # The harness moves spaces at the end of a context to the continuation.
        prefix: list[Any] = [self.prefix_token_id]
        texts = [(context or prefix) + continuation for _, context, continuation in requests]
        _warn_of_truncation(texts, self.max_length + 1)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        bar = self._bar(len(requests), "Running loglikelihood requests", disable_tqdm)
        with bar:
            for places in _batches(texts, self.texts_at_once):
                batch = [texts[place][-(self.max_length + 1) :] for place in places]
                counts = [self._checked_length(requests[place]) for place in places]
                starts = [len(text) - count for text, count in zip(batch, counts, strict=True)]
                scores = self.llm.batch_token_scores_sync(batch, starts)
                for place, score in zip(places, scores, strict=True):
                    answer = score.logprobs.double().sum().item(), bool(score.is_top.all())
                    answers[place] = answer
                    key = requests[place][0]
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                bar.update(len(places))
        return answers

    def _checked_length(self, request: ScoredRequest) -> int:
        """Return the number of tokens of a continuation, which can be scored."""
        texts, _, continuation = request
        if texts is not None and texts[1] and not continuation:
            raise ValueError(
                f"the continuation {texts[1]!r} cannot be scored: the tokenizer encodes it as "
                f"a part of the last token of the context, {texts[0][-20:]!r}"
            )
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens cannot be scored with "
                f"max_length={self.max_length}"
            )
        return len(continuation)

    # -- generation -------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to its first stop text.

        Raises:
            ValueError: A generation argument is unsupported, or leaves no tokens for a context.
        """
        prompts = [self._prompt(*request.args) for request in requests]
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, (_, options) in enumerate(prompts):
            groups.setdefault(repr(options), []).append(place)
        with self._bar(len(requests), "Running generate_until requests", disable_tqdm) as bar:
            for group in groups.values():
                for begin in range(0, len(group), self.texts_at_once):
                    places = group[begin : begin + self.texts_at_once]
                    _, options = prompts[places[0]]
                    contexts = [prompts[place][0] for place in places]
                    continuations = self._continue(contexts, options)
                    for place, text in zip(places, continuations, strict=True):
                        texts[place] = text
                        key = requests[place].args
                        self.cache_hook.add_partial("generate_until", key, text)
                    bar.update(len(places))
        return texts

    def _prompt(
        self, text: str, gen_kwargs: Mapping[str, Any]
    ) -> tuple[list[int], GenerationOptions]:
        """Return the ids of a context, with room for its continuation, and the options."""
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        options = GenerationOptions.of(gen_kwargs, max_tokens=self.max_gen_toks, eos=eos)
        room = self.max_length - options.max_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={options.max_tokens} leaves no room for a context in "
                f"max_length={self.max_length}"
            )
        ids = self._ids(text, self.tokenizer.bos_token)
        if not ids and self.prefix_token_id is not None:
            ids = [self.prefix_token_id]
        if len(ids) > room:
            _logger.warning(
                "a context of %d tokens is truncated to its last %d", len(ids), room
            )
        return ids[-room:], options

    def _continue(self, contexts: list[list[int]], options: GenerationOptions) -> list[str]:
        """Return the continuations of contexts with the same options."""
        # `_text` searches for the others: `hf` also returns the text of the id that ends a
        # continuation, and does not see a first space that the tokenizer does not decode.
        stop_ids = [token_id for token_id in self._ending if not self.tok_decode([token_id])]
        stop_texts = [text for text in options.until if not text.startswith(" ")]
        continuations = self.llm.batch_sample_sync(
            contexts,
            options.max_tokens,
            stop=[*stop_ids, *stop_texts],
            seed=int(torch.randint(2**62, ())),  # from the generator that the harness seeds
            **options.sampling,
        )
        return [self._text(ids, options.until) for ids in continuations]

    def _text(self, ids: list[int], until: Sequence[str]) -> str:
        """Return the text of generated ids after the reasoning and before the stop texts."""
        ends = (place + 1 for place, token_id in enumerate(ids) if token_id in self._ending)
        ids, end = ids[: next(ends, None)], self.think_end_token
        if isinstance(end, int) and end in ids:
            ids = ids[len(ids) - ids[::-1].index(end) :]
        text = self.tok_decode(ids)
        text = text.lstrip() if isinstance(end, int) else text
        answer: str = postprocess_generated_text(
            text, list(until), end if isinstance(end, str) else None
        )
        return answer

    def _bar(self, total: int, title: str, hidden: bool) -> tqdm[Any]:
        return tqdm(total=total, desc=title, disable=hidden or self.rank != 0)


def _load(
    pretrained: str | os.PathLike[str] | genlm.AsyncLM,
    backend: str | None,
    engine_options: Mapping[str, Any],
) -> genlm.AsyncLM:
    if not isinstance(pretrained, genlm.AsyncLM):
        return genlm.load_model(pretrained, backend, **engine_options)
    if backend is not None or engine_options:
        raise TypeError(
            f"pretrained is a loaded model; backend and {sorted(engine_options)} cannot be set"
        )
    return pretrained


def _resolve_max_length(max_length: int | None, max_context: int | None) -> int:
    if max_length is None:
        return int(DEFAULT_MAX_LENGTH) if max_context is None else max_context
    if max_length < 1 or (max_context is not None and max_length > max_context):
        raise ValueError(f"max_length={max_length}; the engine takes 1 to {max_context} tokens")
    return int(max_length)


def _parse_token(think_end_token: str | int | None) -> str | int | None:
    is_id = isinstance(think_end_token, str) and think_end_token.isdigit()
    return int(think_end_token) if is_id else think_end_token  # type: ignore[arg-type]


def _batches(texts: Sequence[list[int]], size: int) -> Iterator[list[int]]:
    """Yield the indices of the texts of each call, sorted by token ids."""
    places = sorted(range(len(texts)), key=lambda place: texts[place])
    for first in range(0, len(places), size):
        yield places[first : first + size]


def _warn_of_truncation(texts: Iterable[Sequence[int]], longest: int) -> None:
    cut = sum(len(text) > longest for text in texts)
    if cut:
        _logger.warning(
            "%d texts of more than %d tokens are scored without their first tokens",
            cut,
            longest,
        )


if "genlm" not in model_registry:  # later versions of the harness may load the entry point
    register_model("genlm")(GenlmLM)
