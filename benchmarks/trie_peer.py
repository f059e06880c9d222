"""genlm-backend's tries, measured in a separate interpreter for `bench_trie.py`.

Reads the name of a measurement per line, prints its milliseconds. Runs in an environment
with genlm-backend and no genlm-core.
"""

from __future__ import annotations

import sys
import time
import warnings

import numpy as np
import torch

from genlm.backend.tokenization import Token
from genlm.backend.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

warnings.simplefilter("ignore")
vocabulary, weights = sys.argv[1:]
with np.load(vocabulary) as file:
    blob, ends = file["blob"].tobytes(), file["ends"].tolist()
tokens = [
    Token(position, blob[start:end])
    for position, (start, end) in enumerate(zip([0, *ends[:-1]], ends))
]
rows = torch.from_numpy(np.load(weights))
tries = {}


def measure(name: str) -> float:
    kind, action = name.split()
    start = time.perf_counter()
    if action == "build":
        made = TokenCharacterTrie if kind == "sequential" else ParallelTokenCharacterTrie
        tries[kind] = made(tokens)
    else:
        count, operation = action.split("-")
        ws = rows[0] if count == "1" else rows
        getattr(tries[kind], f"{'' if count == '1' else 'batch_'}weight_{operation}")(ws)
    return (time.perf_counter() - start) * 1e3


for line in sys.stdin:
    print(measure(line.strip()), flush=True)
