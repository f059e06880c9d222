"""`RowWorker`: methods that genlm adds to vLLM's workers; `call_workers` calls them.

vLLM mixes the class into its worker (`worker_extension_cls`), in this process or another.
The names begin with `genlm_` so that they hide no method of vLLM.

No method raises: when one of several workers raises, vLLM's executor leaves the results of the
others in their queues and returns them for later calls.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from genlm.plugin import Completion, EvaluationError
from genlm_vllm.fallback_attention import check_fallback_attention
from genlm_vllm.processes import TRANSPORT, record_failures, start_parent_watchdog
from genlm_vllm.row_buffer import ROW_BUFFER, VocabularyIds
from genlm_vllm.scores import start_scores

__all__ = ["RowWorker", "call_workers"]

# vLLM's processes import this module before they build a worker: through vLLM, or before it
# if the client's main program imports it, which spawned processes import first.
if record_failures() or "vllm" in sys.modules:  # the client's process: see `lifecycle`
    check_fallback_attention()


def call_workers(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of `RowWorker` on every worker; return their results by rank.

    Raises:
        EvaluationError: The method raised in a worker.
    """
    replies = engine.collective_rpc(method, args=arguments)
    problems = [problem for problem, _ in replies if problem is not None]
    if problems:
        raise EvaluationError(problems[0])
    return [result for _, result in replies]


@contextlib.contextmanager
def _default_stream(device: torch.device) -> Iterator[None]:
    """Run on a device's default stream, on which callers read results.

    vLLM computes on a separate stream, which stays the current stream of the engine's thread
    between calls. That stream waits, so that the thread may read the results as well.
    """
    if device.type != "cuda":
        yield
        return
    own, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    with torch.cuda.stream(default):
        yield
    own.wait_stream(default)


def _replying(method: Callable[..., Any]) -> Callable[..., tuple[str | None, Any]]:
    """Make a method return its error message, or None, and its result."""

    @functools.wraps(method)
    def reply(self: Any, *arguments: Any) -> tuple[str | None, Any]:
        try:
            return None, method(self, *arguments)
        except Exception as error:  # noqa: BLE001 - raised by `call_workers`
            return f"{type(error).__name__}: {error}", None

    return reply


class RowWorker:
    """Returns the rows that `Capture` stored and the scores, and loads adapters."""

    @_replying
    def genlm_start_capture(self, size: int, missing_ids: list[int]) -> None:
        """Set the ids of the rows, before the first request.

        Tensor-parallel ranks compute the same logits; the first one stores rows.
        """
        from vllm.distributed import (
            get_pp_group,
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )

        first = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank
        alone = get_tensor_model_parallel_world_size() == 1
        ROW_BUFFER.reset(VocabularyIds(size, tuple(missing_ids)), active=first, alone=alone)

    @_replying
    def genlm_start_scores(self) -> bool:
        """See `genlm_vllm.scores.start_scores`."""
        worker: Any = self  # vLLM's worker, once this class is mixed in
        return start_scores(worker.model_runner)

    @_replying
    def genlm_describe_model(self) -> dict[str, Any]:
        """Describe the model that vLLM built.

        Returns:
            `model`, the class that implements it; `attention`, the names of the backends;
            `windows`, the sliding window of each layer that has one, by the layer's name;
            `rounded`, the dtypes of parameters that are less precise than the model's dtype,
            by name, unless the model is quantised.
        """
        from vllm.model_executor.layers.attention import Attention

        worker: Any = self  # vLLM's worker, once this class is mixed in
        context = worker.vllm_config.compilation_config.static_forward_context
        layers = {k: layer for k, layer in context.items() if isinstance(layer, Attention)}
        model, config = worker.model_runner.get_model(), worker.vllm_config.model_config
        expected = 0.0 if config.quantization else torch.finfo(config.dtype).eps
        return {
            "model": type(model).__name__,
            "rounded": {
                name: str(each.dtype).removeprefix("torch.")
                for name, each in model.named_parameters()
                if expected and each.is_floating_point()
                if torch.finfo(each.dtype).eps > expected
            },
            "attention": sorted({x.get_attn_backend().get_name() for x in layers.values()}),
            "windows": {
                name: int(layer.sliding_window)
                for name, layer in layers.items()
                if layer.sliding_window is not None
            },
        }

    @_replying
    def genlm_start_parent_watchdog(self, client: int) -> None:
        """See `genlm_vllm.processes.start_parent_watchdog`."""
        start_parent_watchdog(client)

    @_replying
    def genlm_start_forks(self) -> bool:
        """Have forked requests copy KV blocks; return whether they do."""
        start = getattr(self, "start_forks", None)  # of `CPUWorker`
        return start is not None and bool(start())

    @_replying
    def genlm_take(self, keys: list[int], abandoned: list[int]) -> tuple[dict[int, Any], int]:
        """Return results within this process, on the device's default stream.

        Returns:
            As `RowBuffer.take`; `tokens_copied`.
        """
        worker: Any = self
        with _default_stream(worker.device):
            results = ROW_BUFFER.take(keys, abandoned)
        return results, ROW_BUFFER.tokens_copied

    @_replying
    def genlm_take_bytes(
        self, keys: list[int], abandoned: list[int]
    ) -> tuple[bytes, bytes, int]:
        """Return results to another process.

        Returns:
            The two parts of `PackedCompletions`, empty if nothing is stored for the keys;
            `tokens_copied`.
        """
        results = ROW_BUFFER.take(keys, abandoned)
        if not results:
            return b"", b"", ROW_BUFFER.tokens_copied
        completions = [
            Completion(key, error=each)
            if isinstance(each, Exception)
            else Completion(key, each)
            for key, each in results.items()
        ]
        packed = TRANSPORT.pack_completions(completions, ROW_BUFFER.ids.size)
        rows = b"" if packed.rows is None else packed.rows.tobytes()
        return packed.data, rows, ROW_BUFFER.tokens_copied

    @_replying
    def genlm_count_rows(self) -> int:
        """Return the number of stored rows and scores."""
        return len(ROW_BUFFER)

    @_replying
    def genlm_stop_capture(self) -> None:
        """Drop all rows and scores, before the engine closes."""
        ROW_BUFFER.reset(VocabularyIds(0), active=False)

    @_replying
    def genlm_add_adapter(self, name: str, number: int, folder: str) -> bool:
        """Load a LoRA adapter; return whether vLLM loaded it."""
        from vllm.lora.request import LoRARequest

        worker: Any = self  # vLLM's worker, once this class is mixed in
        return bool(worker.add_lora(LoRARequest(name, number, folder)))

    @_replying
    def genlm_remove_adapter(self, number: int) -> None:
        """Remove an adapter that may be loaded in part."""
        worker: Any = self
        if number in worker.list_loras():
            worker.remove_lora(number)
