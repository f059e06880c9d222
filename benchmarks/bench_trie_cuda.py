"""How much of the memory bandwidth does the trie on a GPU use?

On 128,000 tokens, for one row and for 32, float32 and bfloat16:

* the Triton kernels, called as users do and replayed from a CUDA graph;
* the same reductions in torch, and one product with torch's CSR matrix of nodes by tokens,
  which is how genlm-backend's parallel trie works;
* a copy of the bytes of weights and results: weights read once, every node written
  once. Its time is the limit.

The ratio of each row is the copy's time over its own: the fraction of the bandwidth that
is used effectively. The goal for 32 rows of float32 is 0.6. Bytes that the kernels ask
for, caches left out of account, are counted from the plan and printed beside it.
Without a GPU it reports that there is nothing to measure.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import numpy as np
import torch
from report import print_report
from trie_traffic import floor_bytes, kernel_bytes
from trie_vocabulary import words

from genlm import Token
from genlm_trie_cuda.plan import TreePlan
from genlm_trie_cuda.trie import DeviceTrie

ROUNDS = 50
ROWS = (1, 32)
DTYPES = (torch.float32, torch.bfloat16)
OPERATIONS = ("sum", "max", "logsumexp")


def csr(trie: DeviceTrie) -> torch.Tensor:
    """Nodes by tokens, 1 where the token is below the node."""
    lo, hi = trie.layout.lo.astype(np.int64), trie.layout.hi.astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(hi - lo)])
    ranks = np.arange(indptr[-1]) + np.repeat(lo - indptr[:-1], hi - lo)
    return torch.sparse_csr_tensor(
        torch.from_numpy(indptr),
        torch.from_numpy(trie.layout.order[ranks].astype(np.int64)),
        torch.ones(len(ranks)),
        size=(len(trie), trie.layout.n_tokens),
    ).cuda()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_of(n_bytes: int) -> Callable[[], object]:
    """A copy that reads and writes `n_bytes` together."""
    source = torch.empty(n_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return captured(lambda: target.copy_(source))


def contestants(
    tries: dict[str, DeviceTrie], plan: TreePlan
) -> dict[str, Callable[[], object]]:
    generator = torch.Generator("cuda").manual_seed(0)
    matrix = csr(tries["triton"])
    found: dict[str, Callable[[], object]] = {}
    for count in ROWS:
        shape = (count, tries["triton"].layout.n_tokens)
        logits = 3 * torch.randn(shape, device="cuda", generator=generator)
        rows = torch.softmax(logits, -1)
        for dtype in DTYPES:
            label = f"{count}-{str(dtype).removeprefix('torch.')}"
            least = floor_bytes(plan, rows=count, weight_bytes=dtype.itemsize, value_bytes=4)
            found[f"copy {label}"] = copy_of(least)
            for operation in OPERATIONS:
                ws = (rows.log() if operation == "logsumexp" else rows).to(dtype)
                for name, trie in tries.items():
                    reduce = getattr(trie, f"batch_weight_{operation}")
                    run = functools.partial(reduce, ws, returns="torch")
                    found[f"{name} {label} {operation}"] = run
                    found[f"{name}-graph {label} {operation}"] = captured(run)
        found[f"torch-csr {count}-float32 sum"] = lambda rows=rows: matrix @ rows.T
    return found


def microseconds(run: Callable[[], object]) -> float:
    """Time on the device of one call, launches included where they are what takes longest."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def main() -> None:
    if not torch.cuda.is_available():
        print("trie_cuda: no CUDA device here, nothing was measured")
        return
    tokens = [Token(position, word) for position, word in enumerate(words())]
    tries = {name: DeviceTrie(tokens, kernels=name) for name in ("triton", "torch")}
    plan = TreePlan.of_layout(tries["triton"].layout)
    own = contestants(tries, plan)
    # Larger than any cache, so that every round reads its weights from memory.
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in own}
    for number in range(ROUNDS + 3):
        for name, run in own.items():
            flush.zero_()
            elapsed = microseconds(run)
            if number >= 3:  # the first rounds warm up
                samples[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {name: medians[f"copy {name.split()[1]}"] / medians[name] for name in medians}
    extra: dict[str, object] = {"device": torch.cuda.get_device_name(), "seed": 0}
    for count in ROWS:
        size = {"rows": count, "weight_bytes": 4, "value_bytes": 4}
        least = floor_bytes(plan, **size)
        asked = {op: kernel_bytes(plan, op, **size) for op in OPERATIONS}
        bandwidth = least / medians[f"copy {count}-float32"] / 1e3
        print(f"{count} rows: at least {least} bytes; kernels ask for {asked}")
        print(f"{count} rows: a copy of as many moves {bandwidth:.0f} GB/s")
        extra[f"bytes of {count} rows"] = {"floor": least, **asked}
    print_report("trie_cuda", samples, unit="us", ratios=ratios, extra=extra)


if __name__ == "__main__":
    main()
