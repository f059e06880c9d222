"""`AsyncTransformer` as published: objects, names, options, the queue and the tree."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import genlm
from genlm.backend import AsyncTransformer, Token, decode_vocab, load_model_by_name
from genlm.backend.llm import AsyncLM
from genlm.backend.llm.hf import Query

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


# -- the queue ----------------------------------------------------------------------------


def test_a_query_gets_the_logits_after_each_of_its_tokens(llm, model):
    async def main():
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(2)]
        llm.add_query(RED, futures[0], None)
        llm.add_query(BLUE, futures[1], None)
        assert [query.prompt for query in llm.queries] == [RED, BLUE]
        return await asyncio.gather(*futures)

    red, blue = asyncio.run(main())
    assert_right(red.log_softmax(-1), model, *(RED[: n + 1] for n in range(len(RED))))
    assert_right(blue.log_softmax(-1), model, *(BLUE[: n + 1] for n in range(len(BLUE))))
    assert llm.queries == []


def test_a_model_with_another_adapter_has_a_queue_of_its_own(llm, model):
    async def main():
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]
        llm.add_query(RED, futures[0], None)
        bound = llm.with_lora(None)
        bound.add_query(BLUE, futures[1], None)
        await asyncio.wait_for(asyncio.gather(*futures[:2]), 60)
        bound.add_query([7], futures[2], None)
        return [each[-1] for each in await asyncio.wait_for(asyncio.gather(*futures), 60)]

    for row, ids in zip(asyncio.run(main()), (RED, BLUE, [7]), strict=True):
        assert_right(row, model, ids)


def test_queries_can_be_let_go_at_once(llm, model):
    async def main():
        future = asyncio.get_running_loop().create_future()
        llm.add_query([7], future, None)
        llm.batch_evaluate_queries()
        assert llm.queries == []
        return await future

    assert_right(asyncio.run(main()), model, [7])


def test_a_wrong_query_ends_its_future_and_a_cancelled_one_is_left_alone(llm):
    async def main():
        loop = asyncio.get_running_loop()
        complaints = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        wrong, cancelled = loop.create_future(), loop.create_future()
        llm.add_query([SIZE], wrong, None)
        llm.add_query(RED, cancelled, None)
        cancelled.cancel()
        with pytest.raises(genlm.TokenIdError):
            await wrong
        await llm.next_token_logprobs(RED)
        return complaints

    assert asyncio.run(main()) == []


def test_a_reset_ends_queries_too(llm):
    async def main():
        future = asyncio.get_running_loop().create_future()
        llm.add_query(RED, future, None)
        llm.reset_async_queries()
        return (await asyncio.gather(future, return_exceptions=True))[0]

    assert isinstance(asyncio.run(main()), genlm.QueryResetError | torch.Tensor)


def test_keys_and_values_from_elsewhere_are_refused(llm):
    async def main():
        with pytest.raises(ValueError, match="pass the whole sequence"):
            llm.add_query(RED, asyncio.get_running_loop().create_future(), object())

    asyncio.run(main())


def test_a_query_without_a_future_is_refused_and_others_are_answered(llm):
    async def main():
        future = asyncio.get_running_loop().create_future()
        llm.add_query(RED, future, None)
        with pytest.raises(TypeError, match="future=None; expected a future"):
            llm.add_query(BLUE, None, None)
        return await future

    assert asyncio.run(main()).shape == (len(RED), SIZE)


def test_a_published_query_pads_as_published():
    class Past:
        class Layer:
            keys = torch.arange(12.0).reshape(1, 2, 3, 2)

        layers = (Layer,)

        def get_seq_length(self):
            return 3

    query = Query([5, 6], None, Past())
    assert query.prompt_padded(0, 4) == [5, 6, 0, 0]
    assert query.attention_mask(5, 4) == [1, 1, 1, 0, 0, 1, 1, 0, 0]
    assert query.position_ids(5, 4) == [3, 4, 0, 0]
    padded = query.past_padded(0, "keys", 5, torch.float32, "cpu", Past.Layer.keys.shape)
    assert padded.shape == (1, 2, 5, 2)
    assert torch.equal(padded[:, :, :3], Past.Layer.keys)
    assert not padded[:, :, 3:].any()
    fresh = Query([5], None)
    assert fresh.past_len == 0
    assert not fresh.past_padded(0, "keys", 4, torch.float32, "cpu", (1, 2, 3, 2)).any()


# -- the tree -----------------------------------------------------------------------------


def test_walking_the_cache_finds_the_longest_remembered_beginning(llm, model):
    llm.next_token_logprobs_sync(RED[:2])
    node, length, past, base = llm.walk_cache(RED)
    assert (length, past, base) == (2, None, 0)
    assert_right(node.logprobs, model, RED[:2])
    assert llm.walk_cache(BLUE)[1] == 0
    assert llm.walk_cache(BLUE)[0].logprobs is None


def test_walking_the_cache_finds_what_cache_kv_computed(llm, model):
    llm.cache_kv(RED)
    for asked in (RED, [*RED, 5, 6]):
        node, length, past, base = llm.walk_cache(asked)
        assert (length, past, base) == (len(RED), None, 0)
        assert_right(node.logprobs, model, RED)
    assert llm.walk_cache(RED[:3])[1] == 0
    llm.next_token_logprobs_sync([*RED, 5])
    assert llm.walk_cache([*RED, 5, 6])[1] == len(RED) + 1
    llm.clear_cache()
    assert llm.walk_cache(RED)[1] == 0


def test_a_prefix_that_is_freed_is_not_found(llm):
    llm.cache_kv(RED)
    llm.clear_kv_cache()
    node, length, _, _ = llm.walk_cache(RED)
    assert length == 0
    assert node.logprobs is None
