"""`Workers`: exchanges the inputs and results of a step with vLLM's workers."""

from __future__ import annotations

from typing import Any

from genlm.plugin import Completion, Vocabulary
from genlm_vllm.processes import TRANSPORT, Outputs
from genlm_vllm.shared_rows import PackedResults, SharedRows
from genlm_vllm.worker import call_workers
from genlm_vllm.worker_rows import StepInputs, StepResults, VocabularyIds

__all__ = ["Workers"]


class Workers:
    """The workers of an engine, in this process or in others.

    Rows from this process are on the engine's device, from others on the CPU.

    Args:
        engine: The `vllm.LLMEngine`.
        vocabulary: Defines the ids of the rows.
        shared_rows: Memory for rows from other processes; None if the workers run in this one.

    Attributes:
        have_scores: Whether the workers compute scores.
        inputs: Inputs of the next step.
        results: Queries that the last step computed.
    """

    def __init__(
        self, engine: Any, vocabulary: Vocabulary, shared_rows: SharedRows | None
    ) -> None:
        self._engine = engine
        self._shared = shared_rows
        self.inputs, self.results = StepInputs(), StepResults()
        scores = call_workers(
            engine,
            "genlm_start",
            VocabularyIds(vocabulary.size, tuple(vocabulary.missing_ids)),
            engine.vllm_config.parallel_config.pipeline_parallel_size,
            None if shared_rows is None else shared_rows.address,
        )
        self.have_scores = all(scores)

    def sent(self, outputs: Outputs) -> Outputs | bytes:
        """Return the requested outputs of a row in the form that workers receive."""
        return outputs if self._shared is None else TRANSPORT.pack_outputs(outputs)

    def prepare(self) -> None:
        """Send the inputs of a step."""
        if self.inputs:
            inputs, self.inputs = self.inputs, StepInputs()
            call_workers(self._engine, "genlm_prepare", inputs)

    def collect(self) -> dict[int, Completion]:
        """Return the results of the last step by query id; see `WorkerRows.collect`."""
        if not self.results:
            return {}
        wanted, self.results = self.results, StepResults()
        found: dict[int, Completion] = {}
        is_packed = self._shared is not None
        for reply in call_workers(self._engine, "genlm_collect", wanted, is_packed):
            completions = self._unpacked(reply) if isinstance(reply, PackedResults) else reply
            found |= {each.query_id: each for each in completions}
        return found

    def _unpacked(self, results: PackedResults) -> list[Completion]:
        assert self._shared is not None  # noqa: S101 - the workers are in other processes
        return TRANSPORT.unpack_completions(results.with_rows(self._shared))
