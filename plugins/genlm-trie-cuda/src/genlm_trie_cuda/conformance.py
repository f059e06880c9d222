"""The targets of `genlm check cuda`.

One target for each path that the machine supports: the core for weights on the CPU, the
torch path on the CPU, and the kernels on a GPU or with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from genlm.testing import TrieTarget
from genlm_trie_cuda.trie import DeviceTrie


def targets(folder: Path) -> Iterator[TrieTarget]:
    """Yield a target for each path.

    Args:
        folder: Unused.
    """
    del folder
    yield TrieTarget(model="cpu", build=DeviceTrie)
    yield TrieTarget(model="torch", build=functools.partial(DeviceTrie, kernels="torch"))
    if torch.cuda.is_available():
        build = functools.partial(DeviceTrie, device="cuda")
        yield TrieTarget(model="gpu", build=build, devices=("cuda",))
    elif os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        build = functools.partial(DeviceTrie, kernels="triton")
        yield TrieTarget(model="interpreter", build=build)
