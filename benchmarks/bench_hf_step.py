"""How is the time of a step of `genlm-hf` divided, and how much of it can be saved?

The particles of `bench_hf_particles.py`, for lockstep decoding and for the whole of genlm.
Parts of the thread's CPU time of a step:

- weights: the model's linear layers, the limit of all engines;
- attention: attention modules without their linear layers (rotary embeddings,
  storing and reading keys and values);
- other layers: the rest of the forward pass (norms, activations, residuals);
- around: the engine's work outside the pass (prefix tree, plan, log-softmax, rows); for
  lockstep the log-softmax;
- front end: everything else, from the coroutines' requests to their rows.

The ratio is the share of the step. OMP_NUM_THREADS sets torch's threads; with more than
one, the work of the others is only part of the front end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bench_hf_particles import genlm, lockstep
from particle_model import llama, tokenizer
from particle_population import CLOCKS, Population
from report import print_report

from genlm import AsyncLM, OutputCache
from genlm_hf.engine import HFEngine

STEPS, FEW_STEPS = 24, 6


class Stopwatches:
    """CPU seconds of the calls of some functions, by name, in the threads that call them.

    A call is counted from the `start`-th on of each thing watched: what precedes is the
    prefill.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[list[float]]] = {}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time recorded under `name`."""
        times: list[float] = []
        self.calls.setdefault(name, []).append(times)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                times.append(time.thread_time() - start)

        return timed

    def on(self, name: str, module: torch.nn.Module) -> Iterator[Any]:
        """Record the time of a module's forward passes under `name`; yields handles."""
        starts: list[float] = []
        times: list[float] = []
        self.calls.setdefault(name, []).append(times)
        yield module.register_forward_pre_hook(lambda *_: starts.append(time.thread_time()))
        yield module.register_forward_hook(
            lambda *_: times.append(time.thread_time() - starts.pop()), prepend=True
        )

    def milliseconds(self, name: str, last: int) -> float:
        """Of each one's last calls, `last` in number, a step."""
        return sum(sum(times[-last:]) for times in self.calls.get(name, ())) / last * 1e3


@contextmanager
def watched(model: Any) -> Iterator[Stopwatches]:
    """Time a model, its linear layers, its attention modules and the engine's evaluation."""
    watches = Stopwatches()
    layers = model.model.layers
    attention = [layer.self_attn for layer in layers]
    inside = [part for block in attention for part in block.children() if _is_linear(part)]
    linear = [part for part in model.modules() if _is_linear(part)]
    watched_modules = {
        "model": [model],
        "linear": linear,
        "linear in attention": inside,
        "attention": attention,
    }
    handles = [
        handle
        for name, modules in watched_modules.items()
        for module in modules
        for handle in watches.on(name, module)
    ]
    evaluate = HFEngine.evaluate
    HFEngine.evaluate = watches.around("evaluate", evaluate)  # type: ignore[method-assign]
    try:
        yield watches
    finally:
        HFEngine.evaluate = evaluate  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def parts(watches: Stopwatches, step: float, steps: int) -> dict[str, float]:
    """Milliseconds of a step of `step` milliseconds, by where they go."""
    linear, model = watches.milliseconds("linear", steps), watches.milliseconds("model", steps)
    inside = watches.milliseconds("linear in attention", steps)
    attention = watches.milliseconds("attention", steps) - inside
    evaluate = watches.milliseconds("evaluate", steps) or step
    return {
        "weights": linear,
        "attention": attention,
        "other layers": model - linear - attention,
        "around": evaluate - model,
        "front end": step - evaluate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--particles", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model, clock = llama(), CLOCKS["cpu"]
    samples: dict[str, list[float]] = {}
    with AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer(), prepack=True),
        output_cache=OutputCache(0),
    ) as lm:
        for count in options.particles:
            for prompt in options.prompts:
                steps = FEW_STEPS if count * prompt > 20_000 else STEPS
                case = Population(count, prompt, 0, 0, steps)
                contestants: dict[str, Callable[[], float]] = {
                    "lockstep": lambda c=case: lockstep(model, c, clock, preallocated=False),
                    "genlm": lambda c=case: genlm(lm, c, clock),
                }
                for _ in range(options.rounds):
                    for name, run in contestants.items():
                        with watched(model) as watches:
                            step = run()
                        for part, value in parts(watches, step, steps).items():
                            samples.setdefault(f"{case} {name} {part}", []).append(value)
    print_report(
        "hf_step", samples, unit="ms a step", ratios=shares(samples), extra={"clock": "cpu"}
    )


def shares(samples: dict[str, list[float]]) -> dict[str, float]:
    """The part of its step's time that each row is."""
    medians = {row: statistics.median(values) for row, values in samples.items()}
    shares: dict[str, float] = {}
    for row, value in medians.items():
        case = " ".join(row.split()[:2])
        whole = sum(other for name, other in medians.items() if name.startswith(case + " "))
        shares[row] = value / whole
    return shares


if __name__ == "__main__":
    main()
