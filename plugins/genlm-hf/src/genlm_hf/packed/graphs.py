"""Passes of query tokens as CUDA graphs, which are captured once and replayed.

A step of some dozens of tokens launches hundreds of kernels that take microseconds each, and
launching them takes longer than running them. A replayed graph pays for one launch. Its
tensors and launches have one size, so passes are padded (`packed.work_items`), and attention
reads everything that differs between passes from device memory (`packed.kernels`).

Only verified graphs answer: each is compared once with the uncaptured pass.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping

import torch
from cachetools import LRUCache

from genlm.prefix import UnsupportedModelError
from genlm_hf.forward import taken_logits
from genlm_hf.packed.layout import AttentionLayout
from genlm_hf.packed.plan import PackedPlan
from genlm_hf.packed.step_attention import StepInputs, step_attention, tile_of
from genlm_hf.packed.work_items import StepSize, WorkItems, work_items
from genlm_hf.served_model import ServedModel
from genlm_hf.storage import KVStorage

__all__ = ["CapturedSteps"]

_logger = logging.getLogger("genlm_hf")

# Passes of more tokens compute for longer than their launches take.
_MOST_TOKENS = 1024

# Graphs that are kept. Their intermediate results share one pool of memory.
_MOST_GRAPHS = 64

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CapturedSteps:
    """Answers passes from CUDA graphs; those that have none yet, from an uncaptured pass.

    A size of pass is captured when it comes for the second time. Where Triton interprets its
    kernels (`TRITON_INTERPRET=1`), passes run on the CPU and are not captured.

    Args:
        served: The model.
        layout: Its attention layers.
        storage: Keeps keys and values.

    Raises:
        UnsupportedModelError: Steps of this model cannot be captured.
    """

    def __init__(
        self, served: ServedModel, layout: AttentionLayout, storage: KVStorage
    ) -> None:
        _refuse(served.device, layout)
        self._served, self._layout, self._storage = served, layout, storage
        self._tile = tile_of(layout)
        self._steps: LRUCache[tuple[str | None, StepSize], _Step | None]
        self._steps = LRUCache(_MOST_GRAPHS)
        self._logits: torch.Tensor | None = None
        self._captured = self._replayed = 0
        self._refused = ""
        self._pool = torch.cuda.graph_pool_handle() if served.device.type == "cuda" else None

    @torch.inference_mode()
    def __call__(
        self, plan: PackedPlan, adapter: str | None, run: Callable[[PackedPlan], torch.Tensor]
    ) -> torch.Tensor:
        """Return the logits of a pass.

        Args:
            plan: The pass.
            adapter: The adapter that is active.
            run: Runs the pass without a graph.

        Returns:
            Shape `(results, width)`, valid until the next call.
        """
        # Sequences that are there several times have more results than tokens.
        fits = len(plan.results) <= len(plan.tokens) <= _MOST_TOKENS
        if self._refused or plan.chunks or not fits:
            return run(plan)
        items = work_items(plan, self._tile)
        key = (adapter, items.size(len(plan.tokens)))
        if key not in self._steps:
            self._steps[key] = None
            return run(plan)
        step = self._steps[key]
        if step is None:
            return self._capture(key, plan, items, run)
        step.fill(plan, items)
        step.replay()
        self._replayed += 1
        return step.logits[: len(plan.results)]

    def clear(self) -> None:
        """Forget all graphs: the model's weights are at other addresses now."""
        self._steps.clear()

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of captures and replays, and why there are none."""
        return {
            "graphs_captured": self._captured,
            "graphs_replayed": self._replayed,
            "graphs_refused": self._refused,
        }

    def _capture(
        self,
        key: tuple[str | None, StepSize],
        plan: PackedPlan,
        items: WorkItems,
        run: Callable[[PackedPlan], torch.Tensor],
    ) -> torch.Tensor:
        """Capture a step, compare it with the pass without a graph, and return the latter."""
        captured: torch.Tensor | None = None
        try:
            step = self._captured_step(key[1], plan, items)
            step.replay()
            captured = step.logits[: len(plan.results)].clone()
        except Exception as error:  # noqa: BLE001 - the pass without a graph is right
            self._refuse_all(f"capturing one raised {type(error).__name__}: {error}")
        # After the replay: it also stores keys and values, and those that stay must be right.
        expected = run(plan)
        if captured is not None:
            difference = _difference(captured, expected)
            if not difference <= self._served.row_tolerance:
                self._refuse_all(f"rows of one differed by {difference:.3g}")
            else:
                self._steps[key] = step
                self._captured += 1
        return expected

    def _captured_step(self, size: StepSize, plan: PackedPlan, items: WorkItems) -> _Step:
        inputs = StepInputs(size, items.tile, self._served.device)
        inputs.fill(plan, items)
        if self._pool is None:
            logits = self._output(self._run(inputs))
            return _Step(inputs, lambda: logits.copy_(self._run(inputs)), logits)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = self._run(inputs)  # compiles kernels
        torch.cuda.current_stream().wait_stream(stream)
        logits = self._output(first)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for example to draw tokens.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            logits.copy_(self._run(inputs))
        return _Step(inputs, graph.replay, logits)

    def _output(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the memory that the logits of all graphs share, as much as these take."""
        if self._logits is None or len(self._logits) < len(logits):
            self._steps.clear()  # they write to the memory that is replaced
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)]

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        """Run the model over the numbers that `inputs` holds."""
        found = inputs.found
        arguments = {
            "input_ids": found.tokens[None],
            "position_ids": found.positions[None],
            "use_cache": False,
            "return_dict": True,
        }
        with step_attention(self._layout, self._storage, inputs):
            return taken_logits(
                self._served.model,
                arguments,
                (1, len(found.tokens)),
                lambda states: states[:, found.results],
            )[0]

    def _refuse_all(self, reason: str) -> None:
        self._refused = reason
        self._steps.clear()
        self._logits = None
        _logger.warning(
            "%s runs without CUDA graphs: %s. Rows are right; pass cuda_graphs=False to "
            "suppress this message, or report it",
            type(self._served.model).__name__,
            reason,
        )


class _Step:
    """A captured step.

    Args:
        inputs: What it reads.
        replay: Runs it.
        logits: What it writes.
    """

    def __init__(
        self, inputs: StepInputs, replay: Callable[[], object], logits: torch.Tensor
    ) -> None:
        self.fill, self.replay, self.logits = inputs.fill, replay, logits


def _refuse(device: torch.device, layout: AttentionLayout) -> None:
    """Raise `UnsupportedModelError` if steps cannot be captured."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise UnsupportedModelError(f"CUDA graphs need a CUDA device, and it is on {device}")
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

    The root mean square over ids: among millions of logits in bfloat16 a few always differ by
    several times their rounding, those of a wrong row nearly all.
    """
    first, second = a.float().log_softmax(-1), b.float().log_softmax(-1)
    differences = (first - second).masked_fill(first == second, 0.0)
    return float(differences.square().mean(-1).sqrt().max())
