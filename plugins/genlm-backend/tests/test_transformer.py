"""`AsyncTransformer` as published: objects, names and options."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import genlm
from genlm.backend import AsyncTransformer, Token, decode_vocab, load_model_by_name
from genlm.backend.llm import AsyncLM

from .tiny import SIZE, assert_right, rows_alone

RED, BLUE = [10, 11, 12, 13], [90, 91]


def test_a_model_of_ones_own_is_served_and_stays_ones_own(model, tokenizer):
    model.train()
    with AsyncTransformer(model, tokenizer, batch_size=3, timeout=0.5) as llm:
        assert_right(llm.next_token_logprobs_sync(RED), model, RED)
        assert llm.model is model
        assert not model.training  # as published
        assert llm.tokenizer is tokenizer
        assert llm.device == llm.next_token_logprobs_sync(RED).device
        assert (llm.batch_size, llm.timeout) == (3, 0.5)
        asyncio.run(llm.batch_next_token_logprobs([[token] for token in range(3, 23)]))
        assert llm.statistics().largest_batch == 3


def test_it_is_both_the_published_and_the_new_kind_of_model(llm):
    assert isinstance(llm, AsyncLM)
    assert isinstance(llm, genlm.AsyncLM)


def test_it_has_the_published_vocabulary(llm, tokenizer):
    byte_vocab, str_vocab = decode_vocab(tokenizer)
    assert llm.byte_vocab == byte_vocab
    assert [type(token) for token in llm.byte_vocab] == [Token] * SIZE
    assert llm.str_vocab == str_vocab
    assert llm.byte_vocab is llm.byte_vocab


def test_all_ways_of_asking_give_the_unbatched_row(llm, model):
    sequences = [RED, BLUE, [*RED, 5], [7] * 40]
    expected = rows_alone(model, sequences)

    async def asked():
        return [
            torch.stack([await llm.next_token_logprobs(s, None) for s in sequences]),
            await llm.batch_next_token_logprobs(sequences, None),
        ]

    found = [
        *asyncio.run(asked()),
        llm.batch_next_token_logprobs_sync(sequences),
        torch.stack([llm.next_token_logprobs_sync(s, None) for s in sequences]),
        torch.stack([llm.next_token_logprobs_uncached(s) for s in sequences]),
        llm.batch_next_token_logprobs_sync([np.array(s) for s in sequences]),
    ]
    for rows in found:
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
        assert rows.dtype == torch.float32
        assert rows.device.type == "cpu"


def test_synchronous_calls_work_inside_a_running_loop(llm, model):
    async def main():
        return llm.next_token_logprobs_sync(RED), llm.next_token_logprobs_uncached(BLUE)

    assert_right(torch.stack(asyncio.run(main())), model, RED, BLUE)


def test_the_uncached_call_asks_the_engine_again(llm):
    llm.next_token_logprobs_sync(RED)
    before = llm.statistics().answered
    llm.next_token_logprobs_uncached(RED)
    assert llm.statistics().answered == before + 1


def test_a_folder_is_loaded_by_name_with_published_options(folder):
    opts = {"hf_opts": {"torch_dtype": torch.float64}, "batch_size": 2, "timeout": 0.1}
    with load_model_by_name(str(folder), backend="hf", llm_opts=opts) as llm:
        assert isinstance(llm, AsyncTransformer)
        assert llm.model.dtype == torch.float64
        assert llm.next_token_logprobs_sync(RED).dtype == torch.float32
        assert_right(llm.next_token_logprobs_sync(RED), llm.model, RED)


def test_a_checkpoint_keeps_its_own_dtype(model, tokenizer, tmp_path):
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with AsyncTransformer.from_name(str(tmp_path)) as llm:
        assert llm.model.dtype == torch.bfloat16


def test_the_default_backend_is_hf_without_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with load_model_by_name(str(folder)) as llm:
        assert isinstance(llm, AsyncTransformer)


def test_an_unknown_backend_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="expected one of vllm, hf, sgl, mlx, mock"):
        load_model_by_name("any", backend="vlm")


def test_clearing_caches_changes_no_row(llm, model):
    llm.cache_kv(RED)
    llm.next_token_logprobs_sync([*RED, 5])
    llm.clear_kv_cache()
    assert llm.statistics().engine["kv_bytes_used"] == 0
    assert llm.statistics().cache_entries == 1
    llm.cache_kv(RED)
    llm.clear_cache()
    assert llm.statistics().cache_entries == 0
    assert llm.statistics().engine["kv_bytes_used"] == 0
    assert_right(llm.next_token_logprobs_sync([*RED, 5]), model, [*RED, 5])


def test_a_prefix_is_computed_once(llm):
    llm.cache_kv(RED * 5)
    before = llm.statistics().engine["tokens_computed"]
    llm.batch_next_token_logprobs_sync([[*(RED * 5), last] for last in range(30, 40)])
    assert llm.statistics().engine["tokens_computed"] == before + 10


def test_calls_about_prefixes_are_harmless_without_a_prefix_cache(tokenizer):
    import transformers

    config = transformers.MambaConfig(
        vocab_size=SIZE, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    model = transformers.MambaForCausalLM(config).eval()
    with AsyncTransformer(model, tokenizer) as llm:
        assert genlm.Capability.PREFIX_CACHE not in llm.capabilities
        llm.cache_kv(RED)
        llm.clear_kv_cache()
        llm.clear_cache()
        assert_right(llm.next_token_logprobs_sync(RED), model, RED)


def test_cleanup_closes_the_model(model, tokenizer):
    llm = AsyncTransformer(model, tokenizer)
    llm.cleanup()
    with pytest.raises(genlm.EngineClosedError):
        llm.next_token_logprobs_sync(RED)


def test_it_is_an_asynchronous_context_manager(model, tokenizer):
    async def main():
        async with AsyncTransformer(model, tokenizer) as llm:
            return await llm.next_token_logprobs(RED)

    assert_right(asyncio.run(main()), model, RED)
