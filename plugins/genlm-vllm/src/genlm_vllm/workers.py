"""`Workers`: sends the inputs of a step to vLLM's workers and fetches the results."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from genlm.plugin import Completion, EvaluationError, PackedCompletions, Vocabulary
from genlm_vllm.messages import TRANSPORT, ComputedPart, StepInputs, VocabularyIds
from genlm_vllm.worker import Reply, call_workers


class Workers:
    """The workers of an engine, in this process or in others.

    Rows of workers in this process are on the engine's device, other rows on the CPU.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Vocabulary of the rows.
        multiprocess: Whether the workers run in other processes.

    Attributes:
        have_scores: Whether the workers compute scores.
        inputs: Inputs of the next step.
    """

    def __init__(self, engine: Any, vocabulary: Vocabulary, *, multiprocess: bool) -> None:
        self._engine = engine
        self._multiprocess = multiprocess
        self.inputs = StepInputs()
        scores = call_workers(
            engine,
            "genlm_start",
            VocabularyIds(vocabulary.size, tuple(vocabulary.missing_ids)),
            multiprocess,
        )
        self.have_scores = all(scores)

    def prepare(self) -> None:
        """Send the inputs of a step."""
        if self.inputs:
            inputs, self.inputs = self.inputs, StepInputs()
            call_workers(self._engine, "genlm_prepare", inputs)

    def collect(self, parts: list[ComputedPart]) -> dict[int, Completion]:
        """Return results by query id; see `WorkerRows.collect`.

        Args:
            parts: Sequences that the last step computed.
        """
        results: dict[int, Completion] = {}
        has_more = bool(parts)
        while has_more:
            replies: list[Reply] = call_workers(self._engine, "genlm_collect", parts)
            for completions, _ in replies:
                if isinstance(completions, PackedCompletions):
                    completions = TRANSPORT.unpack_completions(completions)  # noqa: PLW2901
                results |= {completion.query_id: completion for completion in completions}
            parts, has_more = [], any(has_more for _, has_more in replies)
        return results

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace the weights of the model; workers in other processes receive copies.

        Raises:
            EvaluationError: The weights do not fit the model, which can no longer be used.
        """
        if self._multiprocess:
            weights = {name: tensor.cpu() for name, tensor in weights.items()}
        try:
            replies = call_workers(self._engine, "genlm_load_weights", weights)
        except EvaluationError as error:  # vLLM lists all parameters of the model
            raise EvaluationError(shorten(str(error), 400)) from error
        names = sorted({name for reply in replies for name in reply})
        if names:
            raise EvaluationError(
                f"{len(names)} parameters of vLLM's model received no weights, such as "
                f"{names[0]!r}; pass all tensors of the checkpoint by name"
            )
