"""Triton's interpreter as a backend for the CPU, on which the second model runner starts.

vLLM's CPU build includes the second model runner, whose kernels are written in Triton, but uses
Triton only if it has a backend named "cpu". Triton's distribution has no such backend. Its
interpreter runs kernels as Python and needs no backend, so a placeholder with that name
suffices.

VLLM_USE_V2_MODEL_RUNNER=1 in the environment chooses the second runner for all tests. On a GPU,
kernels are compiled: the second runner is vLLM's default there, and 0 chooses the first.
"""

from __future__ import annotations

import os

import torch

ON_GPU = torch.cuda.is_available()

SECOND_RUNNER = not ON_GPU and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether the second runner computes, in Triton's interpreter."""


class Interpreter:
    """The methods of a driver that vLLM calls. Nothing is compiled."""

    @classmethod
    def is_active(cls) -> bool:
        return True


def provide() -> None:
    """Add the backend to Triton; must be called before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(compiler=None, driver=Interpreter)
