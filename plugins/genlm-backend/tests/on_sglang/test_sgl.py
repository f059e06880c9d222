"""`AsyncSGLTransformer` on SGLang itself."""

from __future__ import annotations

import asyncio

import pytest
import torch

import genlm
from genlm.backend import load_model_by_name
from genlm.backend.llm import AsyncLM, AsyncSGLTransformer

RED, BLUE = [10, 11, 12, 13], [90, 91]
SEQUENCES = [RED, BLUE, [*RED, 5], [*RED, 6], [7] * 40, [3]]


@pytest.fixture(scope="module")
def llm(tiny, options):
    llm_opts = {"engine_opts": options, "cache_size": 3}
    with load_model_by_name(str(tiny.path), backend="sgl", llm_opts=llm_opts) as llm:
        yield llm


def rows_alone(tiny, sequences):
    return torch.stack([tiny.logprobs(token_ids) for token_ids in sequences]).float()


def assert_right(found, tiny, *sequences):
    torch.testing.assert_close(found, rows_alone(tiny, sequences), atol=1e-4, rtol=0)


def test_it_is_both_the_published_and_the_new_kind_of_model(llm):
    assert type(llm) is AsyncSGLTransformer
    assert isinstance(llm, AsyncLM)
    assert isinstance(llm, genlm.AsyncLM)
    assert len(llm.byte_vocab) == len(llm.str_vocab) == 300


def test_all_ways_of_asking_give_the_unbatched_row(llm, tiny):
    async def asked():
        gathered = await asyncio.gather(*map(llm.next_token_logprobs, SEQUENCES))
        return [torch.stack(gathered), await llm.batch_next_token_logprobs(SEQUENCES)]

    found = [
        *asyncio.run(asked()),
        llm.batch_next_token_logprobs_sync(SEQUENCES),
        torch.stack([llm.next_token_logprobs_sync(s) for s in SEQUENCES]),
    ]
    for rows in found:
        assert_right(rows, tiny, *SEQUENCES)
        assert rows.dtype == torch.float32
        assert rows.device.type == "cpu"
    assert llm.batch_next_token_logprobs_sync([]).shape == (0, 300)


def test_the_output_cache_has_the_size_asked_for(llm, tiny):
    llm.clear_cache()
    for token_ids in (RED, BLUE, [3], RED, [4]):
        llm.next_token_logprobs_sync(token_ids)
    hits = llm.statistics().cache_hits
    assert len(llm.cache) == 3
    assert_right(llm.batch_next_token_logprobs_sync([RED, BLUE]), tiny, RED, BLUE)
    assert llm.statistics().cache_hits == hits + 1  # the oldest was BLUE


def test_clearing_prefixes_changes_no_row(llm, tiny):
    llm.cache_kv(RED)
    llm.clear_cache()
    assert_right(llm.next_token_logprobs_sync([*RED, 5])[None], tiny, [*RED, 5])
    assert llm.clear_kv_cache() is True
    llm.clear_cache()
    assert_right(llm.next_token_logprobs_sync([*RED, 5])[None], tiny, [*RED, 5])


def test_samples_follow_the_rows(llm, tiny):
    expected = list(RED)
    for _ in range(4):
        expected.append(int(tiny.logprobs(expected).argmax()))
    greedy = asyncio.run(llm.sample(RED, 4, [], temperature=0))
    assert greedy == expected[len(RED) :]
    assert asyncio.run(llm.sample(RED, 4, [greedy[2]], temperature=0)) == greedy[:2]
    drawn = asyncio.run(llm.batch_sample([RED] * 5, 6, [], seed=3))
    assert len({tuple(tokens) for tokens in drawn}) > 1
    assert asyncio.run(llm.batch_sample([RED] * 5, 6, [], seed=3)) == drawn


def test_one_bad_request_fails_alone(llm, tiny):
    async def main():
        asked = [RED, [], [300], [3] * 100, BLUE]
        return await asyncio.gather(
            *map(llm.next_token_logprobs, asked), return_exceptions=True
        )

    red, empty, outside, long, blue = asyncio.run(main())
    assert isinstance(empty, genlm.EmptySequenceError)
    assert isinstance(outside, genlm.TokenIdError)
    assert isinstance(long, genlm.ContextLengthError)
    assert_right(torch.stack([red, blue]), tiny, RED, BLUE)


def test_adapters_are_refused_by_name(llm):
    with pytest.raises(NotImplementedError, match="lora"):
        llm.add_new_lora("path", "poet")
    with pytest.raises(ValueError, match="poet"):
        llm.next_token_logprobs_sync(RED, lora_name="poet")
