"""`RowWorker`: methods that genlm adds to vLLM's workers; `call_workers` calls them.

vLLM mixes the class into its worker (`worker_extension_cls`), in this process or another.
The names begin with `genlm_` so that they hide no method of vLLM.

No method raises. If one of several workers raises, vLLM's executor leaves the results of the
other workers in their queues and returns them for later calls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from genlm.plugin import (
    Completion,
    EvaluationError,
    PackedCompletions,
    describe_error,
)
from genlm_vllm.cpu_packing import packing_again
from genlm_vllm.fallback_attention import check_fallback_attention
from genlm_vllm.messages import TRANSPORT, ComputedPart, StepInputs, VocabularyIds
from genlm_vllm.processes import (
    ExecutorError,
    ignore_interrupts,
    record_failures,
    skip_finalization,
)
from genlm_vllm.row_sampler import replace_sampler
from genlm_vllm.scores import ScoreStore, start_scores
from genlm_vllm.worker_rows import WorkerRows

_MAX_REPLY_BYTES = 2**24
"""Maximum number of bytes of a reply with several results. vLLM passes replies of less than 24
MiB through memory that the processes share, and larger ones through a socket, which takes more
time."""

Reply = tuple[list[Completion] | PackedCompletions, bool]
"""Results, packed for another process, and whether the worker has further ones."""

# vLLM's processes import this module before they build a worker: from vLLM, or earlier if the
# client's main program imports it, because spawned processes import that program first.
if record_failures():
    skip_finalization()
    check_fallback_attention()
elif "vllm" in sys.modules:  # for the client's process see `lifecycle`
    check_fallback_attention()


def call_workers(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of `RowWorker` on every worker and return the results by rank.

    Raises:
        EvaluationError: The method raised in a worker.
        ExecutorError: A worker has ended, or did not receive the call.
    """
    try:
        replies = engine.collective_rpc(method, args=arguments)
    except Exception as error:
        raise ExecutorError from error
    problems = [problem for problem, _ in replies if problem is not None]
    if problems:
        raise EvaluationError(problems[0])
    return [result for _, result in replies]


@contextlib.contextmanager
def _default_stream(device: torch.device) -> Iterator[None]:
    """Compute on a device's default stream, on which callers read results.

    vLLM computes on a separate stream, which stays the current stream of the engine's thread
    between calls. The streams wait for each other, so that the results and the memory of the
    logits may be used on both.
    """
    if device.type != "cuda":
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    with torch.cuda.stream(default):
        yield
    current.wait_stream(default)


def _returns_errors(method: Callable[..., Any]) -> Callable[..., tuple[str | None, Any]]:
    """Make a method return the message of its error, or None, and its result."""

    @functools.wraps(method)
    def reply(self: Any, *arguments: Any) -> tuple[str | None, Any]:
        try:
            return None, method(self, *arguments)
        except Exception as error:  # noqa: BLE001 - raised by `call_workers`
            return describe_error(error), None

    return reply


def _tensor_bytes(values: object) -> int:
    """Return the size of the tensors in nested tuples, such as a completion."""
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(map(_tensor_bytes, values)) if isinstance(values, tuple) else 0


class RowWorker:
    """Methods of a worker that reduce rows, compute scores and load adapters."""

    _rows: WorkerRows | None = None
    _sends_results = False
    _unsent: list[Completion]

    # Members of vLLM's worker.
    device: torch.device
    distributed_init_method: str
    model_runner: Any
    vllm_config: Any
    add_lora: Callable[[Any], bool]
    remove_lora: Callable[[int], bool]
    list_loras: Callable[[], set[int]]

    @_returns_errors
    def genlm_start(self, ids: VocabularyIds, sends_results: bool) -> bool:
        """Replace the sampler and enable scores, before the first request.

        Tensor-parallel ranks compute the same logits; the first rank reduces rows.

        Args:
            ids: Vocabulary of the rows.
            sends_results: Whether the results are sent to another process.

        Returns:
            Whether this worker can compute scores; see `genlm_vllm.scores.start_scores`.
        """
        from vllm.distributed import (
            get_pp_group,
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
        )

        if sends_results:
            ignore_interrupts()
        if not get_pp_group().is_last_rank:
            return True
        scores = ScoreStore(
            cast("Any", ids),
            is_active=get_tensor_model_parallel_rank() == 0,
            is_alone=get_tensor_model_parallel_world_size() == 1,
        )
        batches = self.vllm_config.parallel_config.pipeline_parallel_size  # in flight
        self._rows = WorkerRows(replace_sampler(self.model_runner, batches), scores)
        self._sends_results = sends_results
        return start_scores(self.model_runner, scores)

    @_returns_errors
    def genlm_init_method(self) -> str:
        """Return the address by which the workers of an engine connect, such as a file."""
        return self.distributed_init_method

    @_returns_errors
    def genlm_prepare(self, inputs: StepInputs) -> None:
        """Accept the inputs of a step; see `WorkerRows.prepare`."""
        if self._rows is not None:
            self._rows.prepare(inputs)

    @_returns_errors
    def genlm_collect(self, parts: list[ComputedPart]) -> Reply:
        """Return results of a step; further ones are returned by calls without parts."""
        if self._rows is None:
            return [], False
        if parts:
            with _default_stream(self.device):
                self._unsent = self._rows.collect(parts)
        if not (self._sends_results and self._unsent):
            results, self._unsent = self._unsent, []  # or rows would live until the next step
            return results, False
        sizes = itertools.accumulate(map(_tensor_bytes, self._unsent))
        count = max(1, sum(size <= _MAX_REPLY_BYTES for size in sizes))
        results, self._unsent = self._unsent[:count], self._unsent[count:]
        packed = TRANSPORT.pack_completions(results, self._rows.vocab_size)
        return packed, bool(self._unsent)

    @_returns_errors
    def genlm_describe_model(self) -> dict[str, Any]:
        """Describe the model that vLLM built.

        Returns:
            `model`, the class of the model; `attention`, the names of its attention backends;
            `parameters`, the number of parameters in this worker; `windows`, the sliding
            windows of layers by name; `rounded`, the dtypes of parameters that are less precise
            than the model's dtype by name, empty for a quantised model.
        """
        from vllm.model_executor.layers.attention import Attention

        context = self.vllm_config.compilation_config.static_forward_context
        layers = {
            name: layer for name, layer in context.items() if isinstance(layer, Attention)
        }
        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        max_eps = math.inf if config.quantization else torch.finfo(config.dtype).eps
        return {
            "model": type(model).__name__,
            "rounded": {
                name: str(parameter.dtype).removeprefix("torch.")
                for name, parameter in model.named_parameters()
                if parameter.is_floating_point()
                if torch.finfo(parameter.dtype).eps > max_eps
            },
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "attention": sorted(
                {layer.get_attn_backend().get_name() for layer in layers.values()}
            ),
            "windows": {
                name: int(layer.sliding_window)
                for name, layer in layers.items()
                if layer.sliding_window is not None
            },
        }

    @_returns_errors
    def genlm_add_adapter(self, request: Any) -> list[str] | None:
        """Load the adapter of a `LoRARequest`.

        Returns:
            Modules of the adapter whose weights vLLM does not apply on this worker; None if it
            did not load the adapter.
        """
        if not self.add_lora(request):
            return None
        manager = self.model_runner.lora_manager._adapter_manager  # noqa: SLF001
        adapter = manager.get_adapter(request.lora_int_id)
        return sorted(adapter.loras.keys() - manager.modules.keys())

    @_returns_errors
    def genlm_remove_adapter(self, number: int) -> None:
        """Remove an adapter; it may be loaded on some workers only."""
        if number in self.list_loras():
            self.remove_lora(number)

    @_returns_errors
    def genlm_load_weights(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Replace the weights of the model; loaded adapters remain.

        Args:
            weights: All weights of the checkpoint by name.

        Returns:
            Names of parameters of the model that received no weights.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_processing,
            initialize_layerwise_reload,
        )

        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        if config.hf_text_config.tie_word_embeddings and not hasattr(model, "lm_head"):
            # `state_dict` of a transformers model has the tied weights under both names.
            weights = {name: weights[name] for name in weights if name != "lm_head.weight"}
        with set_current_vllm_config(self.vllm_config), packing_again(model):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(weights.items())
            finalize_layerwise_processing(model, config)
        return [] if loaded is None else sorted(names - loaded)
