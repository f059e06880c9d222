"""Triton's interpreter as a backend for the CPU, on which the second model runner starts.

vLLM's CPU build has its second model runner, whose kernels are Triton's, but takes Triton
for absent unless it has a backend named "cpu". Triton's own distribution has none. Under
its interpreter none is needed: the kernels run as Python, and one with that name will do.

VLLM_USE_V2_MODEL_RUNNER=1 in the environment chooses the second runner for all tests.
"""

from __future__ import annotations

import os

SECOND_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


class Interpreter:
    """What vLLM asks of a driver; nothing is ever compiled."""

    @classmethod
    def is_active(cls) -> bool:
        return True


def provide() -> None:
    """Add the backend to Triton's; before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(compiler=None, driver=Interpreter)
