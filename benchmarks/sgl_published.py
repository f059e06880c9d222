"""genlm-backend 0.3.1 on SGLang 0.5.17, measured by its own interpreter.

For `bench_serving_particles.py`: the argument is a model; reads `COUNT PROMPT STEPS KIND` per
line and prints microseconds of CPU and of wall-clock time a token, for its particles and for
SGLang's own generation at temperature 1. The loop is that of `serving_peer.py`. Runs in an
environment with genlm-backend 0.3.1 and sglang 0.5.17, both without their requirements, with
the packages of genlm-sgl's `requirements-cpu.txt`, transformers 5.12.1, xgrammar 0.2.1, numba,
accelerate and protobuf. `genlm_sgl/cpu/stubs.py` is loaded from this repository.
"""

# ruff: noqa: E402 - SGLang reads the environment when it is imported
from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import uuid
import warnings
from array import array
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OUTPUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # SGLang logs to the standard output

import torch
from serving_peer import ServingPeer, answer_requests
from transformers.utils import import_utils

warnings.simplefilter("ignore")


def provide_stubs() -> None:
    """Provide stubs for the packages of a GPU that SGLang imports, as genlm-sgl does."""
    source = (
        Path(__file__).resolve().parents[1] / "plugins/genlm-sgl/src/genlm_sgl/cpu/stubs.py"
    )
    spec = importlib.util.spec_from_file_location("stubs", source)
    assert spec is not None
    assert spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    context = stubs.stub_packages()
    context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    # SGLang 0.5.17 registers image processors, which transformers lacks without torchvision.
    attribute_of = import_utils.DummyObject.__getattribute__
    import_utils.DummyObject.__getattribute__ = lambda cls, name: (
        (lambda *_, **__: None) if name == "register" else attribute_of(cls, name)
    )


provide_stubs()

from sglang.srt.sampling.sampling_params import SamplingParams

from genlm.backend.llm.sgl import AsyncSGLTransformer, Request

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 65_536,
    "max_running_requests": 256,
    "skip_server_warmup": True,
    "log_level": "error",
    "random_seed": 0,
}


class SGLPeer(ServingPeer):
    """genlm-backend's engine for SGLang."""

    def generate(self, prompts: list[list[int]], steps: int) -> None:
        """Drive SGLang's scheduler, as genlm-backend does."""
        scheduler = self.lm.model
        scheduler.process_input_requests([_request(prompt, steps) for prompt in prompts])
        stream = scheduler.device_module.StreamContext(scheduler.schedule_stream)
        with stream, torch.inference_mode():
            while True:
                plan = scheduler.get_next_batch_to_run(
                    running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
                )
                scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
                scheduler.last_batch = batch
                if batch is None:
                    break
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))


def _request(prompt: list[int], steps: int) -> Any:
    params = SamplingParams(max_new_tokens=steps, temperature=1.0, ignore_eos=True)
    params.normalize(None)
    absent = ("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    return Request(
        **dict.fromkeys(absent),
        input_text="",
        input_ids=array("q", prompt),
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        rid=uuid.uuid4().hex,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    lm = AsyncSGLTransformer.from_name(sys.argv[1], engine_opts=OPTIONS)
    answer_requests(SGLPeer(lm), OUTPUT)
