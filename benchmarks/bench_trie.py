"""How fast are the weights of all prefixes computed from the weights of 128,000 tokens?

Contestants, all in every round, with one thread, float32; those of one row after
one call that is not measured, so that the caches do not depend on the previous contestant:

* this trie in numpy (`genlm`) and with numba's machine code (`compiled`), which a trie of this
  size uses by default; the build includes the first sum, in numpy;
* genlm-backend 0.3.1's sequential and parallel tries, in a separate environment
  (`--peer PYTHON`, by default made in `.cache/`);
* one product with scipy's CSR matrix of nodes by tokens, which computes the same sums;
* the limit: reading the weights once and writing every node once, without computation.

The ratio of each row is the best of genlm-backend's tries over it, of the floor and of scipy
as well, from the fastest of as many rounds each (one for building): all of this is bound by
memory, which other processes make slower and never faster. Partial evaluation and logsumexp
have no counterpart there and no ratio.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
from peer import Peer, peer_python
from report import print_report
from trie_vocabulary import CACHE, words

from genlm import Token, TokenCharacterTrie

ROUNDS = 12
ROWS = 32


def reachability(trie: TokenCharacterTrie) -> scipy.sparse.csr_matrix:
    """Nodes by tokens, 1 where the token is below the node."""
    lo, hi = trie.layout.lo.astype(np.int64), trie.layout.hi.astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(hi - lo)])
    ranks = np.arange(indptr[-1]) + np.repeat(lo - indptr[:-1], hi - lo)
    ones = np.ones(len(ranks), np.float32)
    shape = (len(trie), trie.layout.n_tokens)
    return scipy.sparse.csr_matrix((ones, trie.layout.order[ranks], indptr), shape=shape)


def contestants(
    tokens: list[Token], trie: TokenCharacterTrie, rows: torch.Tensor
) -> dict[str, Callable[[], object]]:
    matrix, one, many = reachability(trie), rows[0].numpy(), rows.numpy()
    compiled = TokenCharacterTrie(tokens, compiled=True)
    n, size = len(tokens), len(trie)
    logs = rows.log()
    kids = trie.child_prefixes(trie.node_of(b"the"))
    path = trie.path(b"the")

    def build() -> None:
        TokenCharacterTrie(tokens, compiled=False).weight_sum(one)

    def floor(ws: np.ndarray) -> None:
        out = np.empty((len(ws), size), np.float32)
        out[:, :n] = ws
        out[:, n:] = 1.0

    found = {
        "genlm build": build,
        "genlm 1-children-of-a-node": lambda: trie.partial_sum(rows[0], kids),
        f"genlm {ROWS}-children-of-a-node": lambda: trie.partial_sum(rows, kids),
        "genlm 1-path-from-the-root": lambda: trie.partial_sum(rows[0], path),
        "scipy 1-sum": lambda: matrix @ one,
        f"scipy {ROWS}-sum": lambda: (matrix @ many.T).T,
        "floor 1-sum": lambda: floor(one[None]),
        f"floor {ROWS}-sum": lambda: floor(many),
    }
    for name, each in {"genlm": trie, "compiled": compiled}.items():
        for operation, ws in {"sum": rows, "max": rows, "logsumexp": logs}.items():
            reduce_row = getattr(each, f"weight_{operation}")
            reduce_rows = getattr(each, f"batch_weight_{operation}")
            found[f"{name} 1-{operation}"] = functools.partial(reduce_row, ws[0])
            found[f"{name} {ROWS}-{operation}"] = functools.partial(reduce_rows, ws)
    return found


def measure(rows: torch.Tensor, python: Path) -> tuple[dict[str, list[float]], float]:
    tokens = [Token(position, word) for position, word in enumerate(words())]
    trie = TokenCharacterTrie(tokens, compiled=False)
    own = contestants(tokens, trie, rows)
    samples: dict[str, list[float]] = {}
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, rows.numpy())
        file.flush()
        peer = Peer(python, "trie_peer.py", CACHE, file.name)
        kinds = ("sequential", "parallel")
        for kind in kinds:
            samples[f"{kind} build"] = [peer.measure(f"{kind} build")]
        actions = [
            f"{count}-{operation}" for count in (1, ROWS) for operation in ("sum", "max")
        ]
        for number in range(ROUNDS + 1):
            for name, run in own.items():
                if " 1-" in name:
                    run()
                start = time.perf_counter()
                run()
                elapsed = (time.perf_counter() - start) * 1e3
                if number:  # the first round warms up
                    samples.setdefault(name, []).append(elapsed)
            for name in (f"{kind} {action}" for kind in kinds for action in actions):
                if " 1-" in name:
                    peer.measure(name)
                elapsed = peer.measure(name)
                if number:
                    samples.setdefault(name, []).append(elapsed)
        peer.close()
    tree = trie._segment_tree  # noqa: SLF001
    arrays = [*vars(trie.layout).values(), tree.order, tree.source, *tree.pieces]
    held = sum(array.nbytes for array in arrays) / len(trie)
    return samples, held


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", type=Path, help="a Python with genlm-backend 0.3.1")
    python = parser.parse_known_args()[0].peer or peer_python()
    torch.set_num_threads(1)
    tokens = words()
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(scale=3.0, size=(ROWS, len(tokens)))).float()
    samples, bytes_per_node = measure(torch.softmax(logits, -1), python)
    fastest = {name: min(values) for name, values in samples.items()}
    ratios = {}
    for name, values in samples.items():
        action = name.split()[1]
        peers = [samples.get(f"{kind} {action}", []) for kind in ("sequential", "parallel")]
        if all(peers):
            ratios[name] = min(map(min, peers)) / min(values[: len(peers[0])])
    load = os.getloadavg()[0]
    print(f"{bytes_per_node:.1f} bytes a node; load average {load:.1f}")
    extra = {"bytes_per_node": round(bytes_per_node, 1), "load_average": round(load, 2)}
    order = sorted(samples, key=lambda name: (name.split()[1], fastest[name]))
    print_report(
        "trie", {name: samples[name] for name in order}, unit="ms", ratios=ratios, extra=extra
    )


if __name__ == "__main__":
    main()
