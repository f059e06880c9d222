"""A replica of vLLM with a reservation of two bundles draws continuations."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import genlm
from genlm_vllm.conformance import TinyLlama

VLLM = {"dtype": "float32", "kv_cache_memory_bytes": 2**24, "max_num_seqs": 8}


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_replica_of_vllm_draws_as_every_engine_does(load, tmp_path):
    model = TinyLlama(tmp_path / "model")
    engine_opts = {"multiprocess": False, "engine_opts": VLLM}
    bundles = [{"num_cpus": 0.1}, {"num_cpus": 0.1}]
    llm = load("vllm", str(model.path), replicas=1, engine_opts=engine_opts, resources=bundles)
    prompts = [[3 + i, 5, 7] for i in range(20)]
    options = {"max_tokens": 6, "temperature": 0.7, "seed": 4}
    sample = llm.population(prompts).sample_sync(**options)
    with genlm.load_model(str(model.path), "hf", device="cpu", dtype="float32") as hf:
        expected = hf.population(prompts).sample_sync(**options)
        assert torch.equal(sample.token_ids, expected.token_ids)
        torch.testing.assert_close(sample.logprobs, expected.logprobs, rtol=0, atol=1e-4)
        assert llm.batch_sample_sync(prompts, **options) == hf.batch_sample_sync(
            prompts, **options
        )
