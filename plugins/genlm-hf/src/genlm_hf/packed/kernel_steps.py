"""Passes of query tokens by Triton kernels, optionally replayed from CUDA graphs.

The kernels (`packed.kernels`) read keys and values where they are stored; `packed.attention`
gathers them in every layer. A step of some dozens of tokens still launches
hundreds of kernels that take microseconds each, and launching them takes longer than running
them. Replaying a graph takes one launch. Its tensors and launches have one size, so passes
are padded (`packed.work_items`), and attention reads everything that differs between passes
from device memory.

Only verified kernels and graphs return results: the first pass of the kernels, and one replay
of every graph, are compared with the gathering pass of `packed.attention`.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from cachetools import LRUCache

from genlm.plugin import Count, describe_error
from genlm.prefix import UnsupportedModelError
from genlm_hf.packed.layout import AttentionLayout
from genlm_hf.packed.plan import PackedPlan
from genlm_hf.packed.step_attention import StepMemory, step_attention, tile_of
from genlm_hf.packed.work_items import (
    StepSize,
    WorkItems,
    flattened,
    graph_size,
    work_items,
)
from genlm_hf.served_model import ServedModel
from genlm_hf.storage import KVStorage

_logger = logging.getLogger("genlm_hf")

# With more tokens, computation takes longer than the launches.
_MAX_TOKENS = 1024

# Maximum number of graphs. Their intermediate results share one memory pool.
_MAX_GRAPHS = 64

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Run = Callable[[PackedPlan], torch.Tensor]


class KernelSteps:
    """Computes passes without prefill chunks by kernels, and other passes by another function.

    With graphs, a step is captured when its padded number of tokens occurs for the second
    time. Where Triton interprets its kernels (`TRITON_INTERPRET=1`), passes run on the CPU and
    are not captured.

    Args:
        served: The model.
        layout: The attention layers of the model.
        storage: The tensors of keys and values.
        graphs: Whether steps are replayed from CUDA graphs.

    Raises:
        UnsupportedModelError: The kernels cannot compute steps of this model.
    """

    def __init__(
        self,
        served: ServedModel,
        layout: AttentionLayout,
        storage: KVStorage,
        *,
        graphs: bool,
    ) -> None:
        check_kernels(served.device, layout)
        self._served, self._layout, self._storage = served, layout, storage
        self._tile = tile_of(layout)
        self._memory = StepMemory(served.device)
        self._graphs: LRUCache[tuple[str | None, int], _Graph | None] | None
        self._graphs = LRUCache(_MAX_GRAPHS) if graphs else None
        self._logits: torch.Tensor | None = None
        self._captured = self._replayed = self._steps = 0
        self._is_verified = False  # by a step without a graph
        self._refused = self._graphs_refused = ""
        on_cuda = served.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda and graphs else None

    @torch.inference_mode()
    def __call__(self, plan: PackedPlan, adapter: str | None, run: Run) -> torch.Tensor:
        """Return the logits of a pass.

        Args:
            plan: The pass.
            adapter: The adapter that is active.
            run: Computes the pass without these kernels.

        Returns:
            Shape `(results, width)`, valid until the next call.
        """
        # Duplicate sequences have more results than tokens.
        if self._refused or plan.chunks or len(plan.results) > len(plan.tokens):
            return run(plan)
        items, tokens = work_items(plan, self._tile), len(plan.tokens)
        size = graph_size(tokens, self._tile)
        if self._graphs is not None and tokens <= _MAX_TOKENS and items.fit(size):
            key = adapter, size.tokens
            if key not in self._graphs:
                self._graphs[key] = None
            elif (graph := self._graphs[key]) is not None:
                if self._fill(plan, items, size):
                    graph.replay()
                    self._replayed += 1
                    return graph.logits[: len(plan.results)]
            elif not self._graphs_refused:
                capture = functools.partial(self._capture, key, size, plan, items)
                return self._verify(plan, run, capture, self._refuse_graphs)
        return self._step(plan, items, run)

    def clear(self) -> None:
        """Drop all graphs, because the model's weights have other addresses now."""
        if self._graphs is not None:
            self._graphs.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of kernel steps, captures and replays, and why they are disabled."""
        counts: dict[str, int | float | str]
        counts = {"kernel_steps": Count(self._steps), "kernels_refused": self._refused}
        if self._graphs is not None:
            counts["graphs_captured"] = Count(self._captured)
            counts["graphs_replayed"] = Count(self._replayed)
            counts["graphs_refused"] = self._graphs_refused
        return counts

    def _step(self, plan: PackedPlan, items: WorkItems, run: Run) -> torch.Tensor:
        """Compute a pass without a graph; the first one is compared with `run`."""
        size = StepSize(
            len(plan.tokens), len(items.prefix_items), len(items.suffix_items), self._tile
        )

        def compute() -> torch.Tensor:
            self._fill(plan, items, size)
            logits = self._run(size)[: len(plan.results)]
            self._steps += 1
            return logits

        if self._is_verified:
            return compute()
        logits = self._verify(plan, run, compute, self._refuse)
        self._is_verified = True
        return logits

    def _verify(
        self,
        plan: PackedPlan,
        run: Run,
        compute: Callable[[], torch.Tensor],
        refuse: Callable[[str], None],
    ) -> torch.Tensor:
        """Compare the result of `compute` with the pass without kernels, which is returned.

        If `compute` raises, `refuse` is called with the reason. If the results differ, kernels
        are no longer used. If the pass without kernels raises, for example an out-of-memory
        error, the next pass is compared.
        """
        logits, reason = None, ""
        try:
            logits = compute().clone()
        except Exception as error:  # noqa: BLE001 - the pass without kernels is right
            reason = f"one raised {describe_error(error)}"
        # Runs last, so that the keys and values that remain stored are right.
        try:
            expected = run(plan)
        except BaseException:
            self.clear()  # a new graph is not verified
            raise
        if logits is None:
            refuse(reason)
        elif not (difference := _difference(logits, expected)) <= self._served.row_tolerance:
            self._refuse(f"rows of one differed by {difference:.3g}")
        return expected

    def _fill(self, plan: PackedPlan, items: WorkItems, size: StepSize) -> bool:
        """Write the numbers of a pass; return whether captured graphs can read them."""
        numbers = flattened(plan, items, size)
        is_new = self._memory.reserve(len(numbers))
        if is_new:
            self.clear()
        self._memory.write(numbers)
        return not is_new

    def _capture(
        self, key: tuple[str | None, int], size: StepSize, plan: PackedPlan, items: WorkItems
    ) -> torch.Tensor:
        """Capture a graph, replay it, and return its logits."""
        assert self._graphs is not None  # noqa: S101 - our own mistake
        self._fill(plan, items, size)
        graph = self._capture_graph(size)
        graph.replay()
        self._graphs[key] = graph
        self._captured += 1
        return graph.logits[: len(plan.results)]

    def _capture_graph(self, size: StepSize) -> _Graph:
        if self._pool is None:
            logits = self._output(self._run(size))
            return _Graph(lambda: logits.copy_(self._run(size)), logits)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = self._run(size)  # compiles kernels
        torch.cuda.current_stream().wait_stream(stream)
        logits = self._output(first)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for example to draw tokens.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            logits.copy_(self._run(size))
        return _Graph(graph.replay, logits)

    def _output(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the memory that the logits of all graphs share, at least this size."""
        if self._logits is None or len(self._logits) < len(logits):
            self.clear()  # graphs write to the memory that is replaced
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)]

    def _run(self, size: StepSize) -> torch.Tensor:
        """Run the model over the step of this size whose numbers are in the memory."""
        tensors = self._memory.parts(size)
        attend = functools.partial(step_attention, self._storage, size, tensors)
        return self._layout.compute_logits(
            tensors.tokens, tensors.positions, tensors.results, attend
        )

    def _refuse(self, reason: str) -> None:
        """Compute all further steps without kernels."""
        self._refused = reason
        self._refuse_graphs(reason, "kernels and CUDA graphs")

    def _refuse_graphs(self, reason: str, what: str = "CUDA graphs") -> None:
        """Capture no further steps."""
        self._graphs_refused = reason
        self.clear()
        self._logits = None
        _logger.warning(
            "%s runs steps without %s: %s. Rows are right",
            type(self._served.model).__name__,
            what,
            reason,
        )


class _Graph(NamedTuple):
    """A captured step: the function that replays it, and the output of the replay."""

    replay: Callable[[], object]
    logits: torch.Tensor


def check_kernels(device: torch.device, layout: AttentionLayout) -> None:
    """Raise `UnsupportedModelError` if the kernels cannot compute steps of a model."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    on_cuda = device.type == "cuda" and torch.cuda.is_available()
    if not on_cuda and not interpreted:
        raise UnsupportedModelError(f"its kernels need a CUDA device, and it is on {device}")
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedModelError("Triton is not installed (pip install triton)")
    for layer in layout.layers:
        if layer.shape.device != device:
            raise UnsupportedModelError(
                f"its layers are on several devices, {device} and {layer.shape.device}"
            )
        if layer.shape.dtype not in _DTYPES:
            raise UnsupportedModelError(f"its keys have the dtype {layer.shape.dtype}")


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return how much the log-probabilities of the worst row differ; nan if one is nan.

    The difference is the root mean square over ids: among millions of logits in bfloat16 a few
    always differ by several times their rounding, but nearly all logits of a wrong row do.
    """
    first, second = a.float().log_softmax(-1), b.float().log_softmax(-1)
    differences = (first - second).masked_fill(first == second, 0.0)
    return float(differences.square().mean(-1).sqrt().max())
