"""`RowWorker`: what vLLM's workers can be asked for, and `ask_workers`, which asks.

vLLM mixes the class into its own worker (`worker_extension_cls`), in this process or in
another; the methods' names begin with `genlm_` so that they hide none of vLLM's.

No method raises: when one of several workers does, vLLM's executor leaves the answers of
the others in their queues and takes them for those of later calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from genlm import EvaluationError
from genlm_vllm.failures import record_failures
from genlm_vllm.fallback_attention import check_fallback_attention
from genlm_vllm.kept_rows import KEPT, TokenIds
from genlm_vllm.orphans import end_with

__all__ = ["RowWorker", "ask_workers"]

# vLLM's processes import this module before they build a worker.
record_failures()
check_fallback_attention()


def ask_workers(engine: Any, method: str, *arguments: Any) -> list[Any]:
    """Call a method of `RowWorker` on every worker; return their answers by rank.

    Raises:
        EvaluationError: A worker could not answer.
    """
    replies = engine.collective_rpc(method, args=arguments)
    problems = [problem for problem, _ in replies if problem is not None]
    if problems:
        raise EvaluationError(problems[0])
    return [answer for _, answer in replies]


def _replying(method: Callable[..., Any]) -> Callable[..., tuple[str | None, Any]]:
    """Make a method return what went wrong, None if nothing did, and its answer."""

    @functools.wraps(method)
    def reply(self: Any, *arguments: Any) -> tuple[str | None, Any]:
        try:
            return None, method(self, *arguments)
        except Exception as error:  # noqa: BLE001 - raised by `ask_workers`
            return f"{type(error).__name__}: {error}", None

    return reply


class RowWorker:
    """Gives out the rows that `Capture` kept, and loads adapters."""

    @_replying
    def genlm_begin(self, size: int, missing_ids: list[int]) -> None:
        """Say which ids rows are over, before the first request.

        Tensor-parallel ranks compute the same logits; the first of them keeps rows.
        """
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        first = get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank
        KEPT.begin(TokenIds(size, tuple(missing_ids)), active=first)

    @_replying
    def genlm_describe(self) -> dict[str, Any]:
        """Say what vLLM made of the model.

        Returns:
            `model`, the class that implements it, `attention`, the names of the backends, and
            `windows`, the sliding window of each layer that has one, by the layer's name.
        """
        from vllm.model_executor.layers.attention import Attention

        worker: Any = self  # vLLM's own worker, once this class is mixed in
        context = worker.vllm_config.compilation_config.static_forward_context
        layers = {k: layer for k, layer in context.items() if isinstance(layer, Attention)}
        return {
            "model": type(worker.model_runner.model).__name__,
            "attention": sorted({x.get_attn_backend().get_name() for x in layers.values()}),
            "windows": {
                name: int(layer.sliding_window)
                for name, layer in layers.items()
                if layer.sliding_window is not None
            },
        }

    @_replying
    def genlm_end_with(self, client: int) -> None:
        """End when the process that loaded the model does."""
        end_with(client)

    @_replying
    def genlm_take(self, keys: list[int], oldest: int) -> dict[int, torch.Tensor]:
        """Hand over rows within this process; see `KeptRows.take`."""
        return KEPT.take(keys, oldest)

    @_replying
    def genlm_take_bytes(self, keys: list[int], oldest: int) -> tuple[list[int], bytes]:
        """Hand over rows to another process: their keys, and float32 one after another."""
        rows = KEPT.take(keys, oldest)
        if not rows:
            return [], b""
        return list(rows), torch.stack(list(rows.values())).cpu().numpy().tobytes()

    @_replying
    def genlm_count(self) -> int:
        """Count the rows that nobody has taken."""
        return len(KEPT)

    @_replying
    def genlm_end(self) -> None:
        """Forget all rows; the engine is about to close."""
        KEPT.begin(TokenIds(0), active=False)

    @_replying
    def genlm_add_adapter(self, name: str, number: int, folder: str) -> bool:
        """Load a LoRA adapter as vLLM's `add_lora` does; returns whether it is loaded."""
        from vllm.lora.request import LoRARequest

        worker: Any = self  # vLLM's own worker, once this class is mixed in
        return bool(worker.add_lora(LoRARequest(name, number, folder)))

    @_replying
    def genlm_remove_adapter(self, number: int) -> None:
        """Take an adapter out that may have been loaded in part."""
        worker: Any = self
        if number in worker.list_loras():
            worker.remove_lora(number)
