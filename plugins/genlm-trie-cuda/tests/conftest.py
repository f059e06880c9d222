"""Fixtures that select the kernels: torch's on the CPU, and Triton's where they can run.

Triton runs on a GPU, or in its interpreter, which has to be selected before Triton is
imported: `test_interpreter.py` starts a process for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from genlm_trie_cuda.trie import DeviceTrie

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def build(request: pytest.FixtureRequest) -> Callable[..., DeviceTrie]:
    """Makes a trie that reduces everything with the kernels of the parameter."""
    kernels = request.param
    if kernels == "torch" or INTERPRETED:
        return lambda decode: DeviceTrie(decode, device="cpu", kernels=kernels)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or the interpreter as in test_interpreter.py")
    return lambda decode: DeviceTrie(decode, device="cuda", kernels=kernels)


@pytest.fixture
def build_small(build: Callable[..., DeviceTrie]) -> Callable[..., DeviceTrie]:
    """Makes tries whose trees cover 4 entries, so that small ones have many stages."""
    from genlm_trie_cuda.plan import TreePlan

    def make(decode: Any) -> DeviceTrie:
        trie = build(decode)
        trie.__dict__["_plan"] = TreePlan.of_layout(trie.layout, block=4)
        return trie

    return make
