"""Models that users write on the published base, and the mock."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
import torch

import genlm
from genlm.backend import AsyncTokenCharacterTrie, load_model_by_name
from genlm.backend.llm import AsyncLM, MockAsyncLM

from .tiny import SIZE


class Uniform(AsyncLM):
    """What programs for genlm-backend define."""

    async def next_token_logprobs(self, token_ids, lora_name=None):
        return self.next_token_logprobs_sync(token_ids, lora_name)

    def next_token_logprobs_sync(self, token_ids, lora_name=None):
        allowed = torch.full((len(self.byte_vocab),), float("-inf"))
        allowed[[len(token_ids) % 7 + 2, 20]] = np.log(0.5)
        return allowed


def test_a_base_without_its_methods_cannot_be_made(tokenizer):
    with pytest.raises(TypeError, match="abstract"):
        AsyncLM(tokenizer)


def test_a_model_of_two_methods_has_the_others(tokenizer):
    llm = Uniform(tokenizer)
    assert len(llm.byte_vocab) == len(llm.str_vocab) == SIZE
    expected = torch.stack([llm.next_token_logprobs_sync([0] * n) for n in (1, 2)])
    sequences = [[0], [0, 0]]
    assert torch.equal(asyncio.run(llm.batch_next_token_logprobs(sequences)), expected)
    assert torch.equal(llm.batch_next_token_logprobs_sync(sequences), expected)
    llm.clear_cache()
    assert llm.lora_view(None) is llm
    for call in (llm.add_new_lora, llm.remove_lora, llm.lora_view):
        with pytest.raises(NotImplementedError, match="lora"):
            call("poet")


def test_a_model_of_ones_own_is_sampled_as_any(tokenizer):
    llm = Uniform(tokenizer)
    drawn = asyncio.run(llm.batch_sample([[1]] * 20, 5, [], seed=1))
    assert drawn == asyncio.run(llm.batch_sample([[1]] * 20, 5, [], seed=1))
    assert len({tuple(tokens) for tokens in drawn}) > 1
    for tokens in drawn:
        assert [t == 20 or t == n % 7 + 2 for n, t in enumerate(tokens, 1)] == [True] * 5
    greedy = asyncio.run(llm.sample([1], 3, [], temperature=0))
    assert greedy == [3, 4, 5]
    assert asyncio.run(llm.sample([1], 9, [5], temperature=0)) == [3, 4]
    assert asyncio.run(llm.sample([1], 0, [])) == []


def test_samples_of_several_prompts_are_those_of_an_overridden_sample(tokenizer):
    class Shouting(Uniform):
        async def sample(self, prompt_token_ids, max_tokens, eos_token_ids, *options):
            ids = await super().sample(prompt_token_ids, max_tokens, eos_token_ids, *options)
            return [*ids, 99]

    drawn = asyncio.run(Shouting(tokenizer).batch_sample([[1]] * 3, 2, [], temperature=0))
    assert drawn == [[3, 4, 99]] * 3


def test_a_sample_is_drawn_with_the_probabilities_of_the_row_at_its_temperature(tokenizer):
    class Fixed(Uniform):
        def next_token_logprobs_sync(self, token_ids, lora_name=None):
            row = torch.full((SIZE,), float("-inf"))
            row[[5, 6]] = torch.tensor([0.8, 0.2]).log()
            return row

    llm, count = Fixed(tokenizer), 2000
    for temperature, expected in ((1.0, 0.8), (0.5, 0.64 / 0.68)):
        drawn = asyncio.run(llm.batch_sample([[1]] * count, 1, [], temperature, seed=0))
        share = sum(tokens == [5] for tokens in drawn) / count
        assert share == pytest.approx(expected, abs=5 * (0.25 / count) ** 0.5)
        assert all(tokens in ([5], [6]) for tokens in drawn)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"max_tokens": -1}])
def test_impossible_samples_are_refused(tokenizer, wrong):
    arguments = {"max_tokens": 3, "temperature": 1.0} | wrong
    with pytest.raises(ValueError, match="negative"):
        asyncio.run(Uniform(tokenizer).sample([1], eos_token_ids=[], **arguments))


def test_the_mock_gives_a_row_of_its_own_to_each_sequence(tokenizer):
    llm = MockAsyncLM(tokenizer)
    sequences = [[], [0], [0, 0], [4], [2, 1], [1, 2], [2**31], [4, 0], [0, 4], [256], [0, 1]]
    rows = llm.batch_next_token_logprobs_sync(sequences)
    assert torch.equal(asyncio.run(llm.batch_next_token_logprobs(sequences)), rows)
    assert len(torch.unique(rows, dim=0)) == len(sequences)
    assert rows.dtype == torch.float32
    assert rows.device == llm.device
    masses = rows.double().exp().sum(-1)
    torch.testing.assert_close(
        masses, torch.ones(len(rows), dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_the_mock_gives_a_sequence_the_same_row_in_every_process(tokenizer):
    logits = np.random.default_rng(
        int.from_bytes(hashlib.sha256(b"\x04" + b"\0" * 7).digest(), "big")
    ).random(SIZE, dtype=np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    for ids in ([4], (4,), np.array([4]), torch.tensor([4])):
        found = MockAsyncLM(tokenizer).next_token_logprobs_sync(ids)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_the_mock_takes_long_sequences_and_no_adapters(tokenizer):
    llm = MockAsyncLM(tokenizer)
    assert llm.next_token_logprobs_sync([250] * 9000).shape == (SIZE,)
    with pytest.raises(ValueError, match="poet"):
        llm.next_token_logprobs_sync([1], lora_name="poet")


def test_a_mock_is_made_of_a_models_tokenizer(folder):
    llm = load_model_by_name(str(folder), backend="mock")
    assert isinstance(llm, MockAsyncLM)
    assert isinstance(llm, AsyncLM)
    assert len(llm.byte_vocab) == SIZE


def test_rows_of_a_mock_go_through_a_trie(tokenizer):
    llm = MockAsyncLM(tokenizer)

    async def main():
        async with AsyncTokenCharacterTrie.from_vocab(llm.byte_vocab) as trie:
            row = await llm.next_token_logprobs([1])
            return await trie.weight_sum(row.exp()), trie.trie.root

    sums, root = asyncio.run(main())
    assert sums[root] == pytest.approx(1, abs=1e-5)


def test_the_core_and_this_agree_on_errors(tokenizer):
    with pytest.raises(genlm.GenlmError):
        MockAsyncLM(tokenizer).next_token_logprobs_sync([1], "poet")
