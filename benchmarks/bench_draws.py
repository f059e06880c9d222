"""How fast are draws, masses and the largest entries of many rows?

1,000 rows of random logits, float32, on a CPU; the limit is reading them once from memory and
one exponential per entry. Every contestant gets logits and one mask of half of the ids, and
returns a token and its log-probability for each row.

- draws: log-softmax and `batch_draw` of some rows at once, against loops over rows of
  log-softmax, mask and inversion of the cumulative sum in torch. In one loop the mask is
  `masked_fill`, in the other the probabilities are multiplied by it, which is faster.
- top-k: `batch_top_k` of log-probabilities against `torch.topk` of all rows, whose order of
  equal values is undefined. 100 rows.
- draws under top-k 50, and under top-p 0.9, of log-probabilities, against a loop that sorts
  each row. 100 rows with 90 % of the probability on some tens of tokens, and 100 rows ("flat")
  with it on most tokens.
- memory: memory of a process beyond the logits, for the draws, in a separate process.

The ratio is that of each to the fastest peer of its case; memory has none.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import print_report

from genlm.core.rows.draws import batch_draw
from genlm.core.rows.logits import row_parts
from genlm.core.rows.row_weights import RowWeights
from genlm.core.rows.sampling import uniforms
from genlm.core.rows.selection import batch_top_k
from genlm.core.rows.truncation import Truncation

ROWS, FEW = 1000, 100
SIZES = (32_000, 128_000)
WIDE = 128_000


class Case:
    """Logits, a mask and random numbers."""

    def __init__(self, size: int, count: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = 3 * torch.randn(count, size, generator=generator)
        self.mask = torch.rand(size, generator=generator) < 0.5
        self.numbers = torch.from_numpy(uniforms(0, np.arange(count), 0))

    def kernels(self) -> torch.Tensor:
        """The contestant."""
        weights, token_ids = RowWeights(self.logits.shape, self.mask), []
        for begin, end in row_parts(*self.logits.shape, self.logits.device):
            rows = torch.log_softmax(self.logits[begin:end], -1)
            own = weights.of(np.arange(begin, end))
            token_ids.append(batch_draw(rows, self.numbers[begin:end], own).token_ids)
        return torch.cat(token_ids)

    def loop(self, masked: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A peer: one row after the other."""
        token_ids = []
        for row, number in zip(self.logits, self.numbers.tolist(), strict=True):
            logprobs = row.log_softmax(-1)
            cumulative = masked(logprobs).cumsum(-1)
            token = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
            token_ids.append(token)
            _ = float(logprobs[token]), float(cumulative[-1].log())
        return torch.tensor(token_ids)

    def filled(self, logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs.masked_fill(~self.mask, -torch.inf).exp()

    def multiplied(self, logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs.exp().mul_(self.mask.view(torch.uint8))


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what was returned."""
    start = time.perf_counter()
    found = run()
    return (time.perf_counter() - start) * 1e3, found


def draws(size: int, rounds: int, samples: dict[str, list[float]]) -> None:
    """Milliseconds for all rows."""
    case = Case(size)
    contestants: dict[str, Callable[[], torch.Tensor]] = {
        "loop, masked_fill": lambda: case.loop(case.filled),
        "loop, multiplied": lambda: case.loop(case.multiplied),
        "batch_draw": case.kernels,
    }
    for _ in range(rounds):
        found = {}
        for name, run in contestants.items():
            elapsed, found[name] = timed(run)
            samples.setdefault(f"draws, V={size} {name}", []).append(elapsed)
    kernels = found["batch_draw"]
    differing = int((kernels != found["loop, multiplied"]).sum())
    # The peers' cumulative sums in float32 are less exact: near a boundary they draw another.
    assert differing <= ROWS // 50, differing


def sorted_draws(logprobs: torch.Tensor, numbers: list[float], k: int, p: float) -> list[int]:
    """A peer: sort each row, keep the first ones, draw."""
    token_ids = []
    for row, number in zip(logprobs, numbers, strict=True):
        values, ids = row.exp().sort(descending=True, stable=True)
        values = values[:k].double()
        cumulative = values.cumsum(-1)
        kept = int((cumulative - values < p * cumulative[-1]).sum())
        chosen, order = ids[:kept].sort()
        cumulative = values[:kept][order].cumsum(-1)
        place = torch.searchsorted(cumulative, number * cumulative[-1], right=True)
        token_ids.append(int(chosen[place]))
    return token_ids


def selections(size: int, rounds: int, samples: dict[str, list[float]]) -> None:
    """Milliseconds for all rows."""
    case = Case(size, FEW)
    # A peaked distribution, in which 90 % of the mass is on some tens of tokens.
    logprobs = (2 * case.logits).log_softmax(-1)
    flat = (0.1 * case.logits).log_softmax(-1)
    numbers = case.numbers.tolist()
    for _ in range(rounds):
        for k in (10, 1000):
            elapsed, plain = timed(lambda k=k: logprobs.topk(k))
            samples.setdefault(f"top-k {k}, V={size} torch.topk", []).append(elapsed)
            elapsed, found = timed(lambda k=k: batch_top_k(logprobs, k))
            samples.setdefault(f"top-k {k}, V={size} batch_top_k", []).append(elapsed)
            assert torch.equal(found[0], plain.values)
        for what, rows, k, p in (
            ("top-k 50", logprobs, 50, 1.0),
            ("top-p 0.9", logprobs, size, 0.9),
            ("top-p 0.9, flat", flat, size, 0.9),
        ):
            elapsed, expected = timed(
                lambda rows=rows, k=k, p=p: sorted_draws(rows, numbers, k, p)
            )
            samples.setdefault(f"draws, {what}, V={size} loop, sort", []).append(elapsed)
            elapsed, drawn = timed(
                lambda rows=rows, k=k, p=p: batch_draw(
                    rows,
                    case.numbers,
                    RowWeights(rows.shape, truncation=Truncation.checked(size, k, p, None)),
                )
            )
            samples.setdefault(f"draws, {what}, V={size} batch_draw", []).append(elapsed)
            assert sum(map(int.__ne__, drawn.token_ids.tolist(), expected)) <= FEW // 50


def memory() -> float:
    """MiB that draws need beside the logits: the growth of the peak."""
    case = Case(WIDE)
    batch_draw(case.logits[:1], case.numbers[:1], RowWeights((1, WIDE)))  # loads libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    before = resident_bytes("VmHWM")
    case.kernels()
    return (resident_bytes("VmHWM") - before) / 2**20


def resident_bytes(name: str) -> int:
    """A size in the status of this process."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure memory alone")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory())
        return
    samples: dict[str, list[float]] = {}
    for size in SIZES:
        draws(size, arguments.rounds, samples)
        selections(size, arguments.rounds, samples)
    medians = {row: statistics.median(values) for row, values in samples.items()}
    ratios = {}
    for row, median in medians.items():
        case = row.rpartition(f"V={row.split('V=')[1].split()[0]}")[0]
        size = row.split("V=")[1].split()[0]
        peers = [
            value
            for other, value in medians.items()
            if other.startswith(f"{case}V={size} ") and "batch_" not in other
        ]
        ratios[row] = median / min(peers)
    command = [sys.executable, __file__, "--memory"]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print_report(
        "draws",
        samples,
        unit="ms for all rows",
        ratios=ratios,
        extra={
            "rows_of_draws": ROWS,
            "rows_of_selections": FEW,
            "mebibytes": round(float(needed), 1),
        },
    )


if __name__ == "__main__":
    main()
