"""Scores of texts, computed in vLLM's workers from the hidden states of each step.

vLLM computes the hidden states of all scheduled tokens, and the logits of the last token of
each request. This module also computes the logits of the scored positions, in pieces, where
vLLM computes prompt log-probabilities. It runs in the process of the model's last layer, on all
tensor-parallel ranks, which compute logits together; one rank stores the scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from genlm.plugin import EvaluationError, Query, describe_error, device_index
from genlm.prefix import PieceScores, TextResult
from genlm_vllm.messages import NewQuery

if TYPE_CHECKING:
    from genlm.plugin import Vocabulary

_LOGITS_PER_PIECE = 2**22
"""Maximum number of logits in a piece: 16 MiB in float32, which the allocator reuses. Larger
pieces would cause page faults."""

_MIN_POSITIONS = 128
"""Minimum number of positions in a piece, even if they have more logits, because each piece
reads the whole output embedding."""


class ScoredText(NamedTuple):
    """A text and its scores.

    Attributes:
        query: Query for the text.
        scores: Results, or the error, of the text.
    """

    query: NewQuery
    scores: PieceScores


class Span(NamedTuple):
    """The tokens of a text that a step computes.

    Attributes:
        text: The text.
        row: Index of the first token in the step's hidden states.
        begin: Position of the first token in the text.
        length: Number of tokens.
    """

    text: ScoredText
    row: int
    begin: int
    length: int

    @property
    def wanted(self) -> range:
        """Targets that these tokens predict."""
        first, count = self.text.query.first, len(self.text.query.targets)
        begin = max(0, self.begin - first)
        return range(begin, min(count, self.begin + self.length - first))

    @property
    def rows(self) -> range:
        """Indices of the hidden states that predict the wanted targets."""
        wanted, offset = self.wanted, self.row + self.text.query.first - self.begin
        return range(wanted.start + offset, wanted.stop + offset)


class ScoreStore:
    """The texts that this worker scores, and their scores.

    A text may be computed in several steps, and again from its beginning after preemption.

    Args:
        vocabulary: Vocabulary of the rows.
        is_active: Whether this process stores scores, as one of the tensor-parallel ranks does.
        is_alone: Whether no other rank computes the same logits, so that this process may
            handle errors.

    Attributes:
        texts: The texts by query id.
    """

    def __init__(self, vocabulary: Vocabulary, *, is_active: bool, is_alone: bool) -> None:
        self.vocabulary = vocabulary
        self.is_active = is_active
        self.is_alone = is_alone
        self.texts: dict[int, ScoredText] = {}

    def begin(self, query: NewQuery) -> None:
        """Score a text from the next step on, until `take` is called."""
        text = Query(query.query_id, (), outputs=query.outputs, targets=query.targets)
        scores = PieceScores([text], self.vocabulary)
        self.texts[query.query_id] = ScoredText(query, scores)

    def take(self, query_id: int) -> TextResult | None:
        """Remove a text and return its scores or the error that was stored.

        Returns None if scores are missing, because positions in vLLM's prefix cache were not
        computed.
        """
        _, scores = self.texts.pop(query_id)
        return scores.results()[0] if scores.is_complete else None


def start_scores(runner: Any, store: ScoreStore) -> bool:
    """Make a model runner of vLLM score the texts of a store.

    Args:
        runner: vLLM's model runner.
        store: Has the texts, and receives the scores.

    Returns:
        Whether the runner computes scores: False if their logits would be wrong.
    """
    adapters = _AdapterIndices(runner)
    if not adapters.can_change or runner.cache_config.kv_sharing_fast_prefill:
        return False  # fast prefill computes the hidden states of the last positions only
    prompts = getattr(runner, "prompt_logprobs_worker", None)
    if prompts is not None:  # the second model runner
        compute = prompts.compute_prompt_logprobs

        def compute_with_scores(
            logits: Any, hidden_states: torch.Tensor, step_batch: Any, *arguments: Any
        ) -> Any:
            places = {name: place for place, name in enumerate(step_batch.req_ids)}
            spans = [
                Span(
                    text,
                    int(step_batch.query_start_loc_np[place]),
                    int(step_batch.num_computed_prefill_tokens_np[place]),
                    int(step_batch.num_scheduled_tokens[place]),
                )
                for text in store.texts.values()
                if (place := places.get(text.query.name)) is not None
            ]
            _score(logits, hidden_states, spans, adapters, store)
            return compute(logits, hidden_states, step_batch, *arguments)

        prompts.compute_prompt_logprobs = compute_with_scores
        return True
    original = runner._get_prompt_logprobs_dict  # noqa: SLF001 - called in every step

    def logprobs_with_scores(
        hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> Any:
        spans = [
            Span(
                text,
                int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]]),
                runner.requests[name].num_computed_tokens,
                num_scheduled_tokens[name],
            )
            for text in store.texts.values()
            if (name := text.query.name) in num_scheduled_tokens
        ]
        _score(runner.model.compute_logits, hidden_states, spans, adapters, store)
        return original(hidden_states, num_scheduled_tokens)

    runner._get_prompt_logprobs_dict = logprobs_with_scores  # noqa: SLF001
    return True


def _score(
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden_states: torch.Tensor,
    spans: Sequence[Span],
    adapters: _AdapterIndices,
    store: ScoreStore,
) -> None:
    """Compute the scores of a step in pieces and store them, or store the error."""
    spans = [span for span in spans if span.wanted]
    if not spans:
        return
    rows = [row for span in spans for row in span.rows]
    size = max(_MIN_POSITIONS, _LOGITS_PER_PIECE // store.vocabulary.size)
    try:
        index = device_index(rows, hidden_states.device)
        for begin in range(0, len(rows), size):
            part = index[begin : begin + size]
            with adapters.set_for(part):
                logits = compute_logits(hidden_states[part])
            if logits is not None and store.is_active:
                _add(logits, begin, spans)
    except Exception as error:
        if not store.is_alone:  # all ranks compute logits together
            raise
        message = f"vLLM did not compute the scores: {describe_error(error)}"
        for span in spans:
            span.text.scores.put(0, EvaluationError(message))  # raising it would end vLLM


def _add(logits: torch.Tensor, begin: int, spans: Sequence[Span]) -> None:
    """Add a piece of the logits, which begins at position `begin` of all spans together."""
    first = 0
    for span in spans:
        low = max(first, begin)
        high = min(first + len(span.wanted), begin + len(logits))
        if low < high:
            part = logits[low - begin : high - begin]
            targets = span.wanted[low - first : high - first]
            span.text.scores.add(np.arange(targets.start, targets.stop), part)
        first += len(span.wanted)


class _AdapterIndices:
    """Adapter indices that vLLM's logits processor reads with LoRA, one for each row.

    vLLM sets the indices of the rows that it samples from.

    Attributes:
        can_change: Whether other indices may be set, as without LoRA and on the CPU. GPUs are
            untested.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.lora.layers import LogitsProcessorWithLoRA
        from vllm.platforms import current_platform

        processors = [
            module
            for module in runner.get_model().modules()
            if isinstance(module, LogitsProcessorWithLoRA)
        ]
        self._wrapper = processors[0].punica_wrapper if processors else None
        self.can_change = not processors or current_platform.is_cpu()

    @contextlib.contextmanager
    def set_for(self, rows: torch.Tensor) -> Iterator[None]:
        """Set the indices for some tokens of the step, by their rows of hidden states."""
        wrapper = self._wrapper
        if wrapper is None or wrapper.indices_len[0] is None:  # no adapter was ever loaded
            yield
            return
        indices, length = wrapper._sampler_indices, wrapper.indices_len[1]  # noqa: SLF001
        wrapper._sampler_indices = wrapper.token_lora_indices[rows]  # noqa: SLF001
        wrapper.indices_len[1] = len(rows)
        try:
            yield
        finally:
            wrapper._sampler_indices = indices  # noqa: SLF001
            wrapper.indices_len[1] = length
