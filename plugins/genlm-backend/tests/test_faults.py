"""What was wrong with genlm-backend 0.3.1 is right here, through the published interface."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import genlm
from genlm.backend import (
    AsyncTokenCharacterTrie,
    AsyncTransformer,
    ParallelTokenCharacterTrie,
    Token,
    TokenCharacterTrie,
)
from genlm.backend.cache import OutputCache, TokenTrie
from genlm.backend.llm import MockAsyncLM

from .tiny import SIZE, alone, assert_right

RED, BLUE, TAIL = [10, 11, 12, 13], [90, 91, 92, 93, 94], [40, 41]


def asked_together(llm, *sequences):
    async def main():
        return await asyncio.gather(*map(llm.next_token_logprobs, sequences))

    return torch.stack(asyncio.run(asyncio.wait_for(main(), 120)))


# -- the right row ------------------------------------------------------------------------


def test_equal_suffixes_after_different_cached_prefixes_are_told_apart(llm, model):
    assert llm.statistics().engine["execution_path"] == "packed"  # prefixes are shared
    llm.cache_kv(RED)
    llm.cache_kv(BLUE)
    rows = asked_together(llm, RED + TAIL, BLUE + TAIL, TAIL)
    assert_right(rows, model, RED + TAIL, BLUE + TAIL, TAIL)


def test_the_synchronous_path_uses_the_state_of_its_own_prefix(llm, model):
    llm.cache_kv(RED)
    llm.cache_kv([*RED, 50, 51])
    for tail in ([60], [50, 60], [50, 51, 60]):
        assert_right(llm.next_token_logprobs_sync(RED + tail), model, RED + tail)


def test_the_synchronous_path_does_not_extend_what_is_cached(llm, model):
    llm.cache_kv(RED)
    for tail in ([60, 61], [70], [60, 61, 62], [70, 71]):
        assert_right(llm.next_token_logprobs_sync(RED + tail), model, RED + tail)
        assert_right(llm.next_token_logprobs_uncached(RED + tail), model, RED + tail)


def test_logits_beyond_the_vocabulary_are_cut_before_normalising(llm, model):
    row = llm.next_token_logprobs_sync(RED)
    assert row.shape == (len(llm.byte_vocab),) == (SIZE,)
    assert torch.logsumexp(row, 0).item() == pytest.approx(0, abs=1e-4)
    assert_right(row, model, RED)


def test_changing_a_row_changes_nobody_elses(llm, model):
    async def main():
        asked = [llm.next_token_logprobs(RED) for _ in range(2)]
        return await asyncio.gather(*asked, llm.batch_next_token_logprobs([RED]))

    first, second, batch = asyncio.run(main())
    first.fill_(7)
    llm.next_token_logprobs_sync(RED).fill_(8)
    asyncio.run(llm.next_token_logprobs(RED)).fill_(9)  # from the cache
    assert_right(second, model, RED)
    assert_right(batch, model, RED)
    assert_right(llm.next_token_logprobs_sync(RED), model, RED)


def test_no_row_is_lost_when_many_extend_one_prefix_at_once(llm, model):
    sequences = [[*RED, last] for last in range(30, 60)]
    asked_together(llm, *sequences)
    again = asked_together(llm, *sequences)
    assert llm.statistics().cache_hits == len(sequences)
    assert_right(again, model, *sequences)


def test_the_tree_of_rows_keeps_what_is_below_a_node_added_again():
    root = TokenTrie()
    root.add_token(1).add_token(2, torch.zeros(3))
    root.add_token(1, torch.ones(3))
    assert root.get_token(1).logprobs is not None
    assert root.get_token(1).get_token(2).logprobs is not None


# -- every request ends -------------------------------------------------------------------


def test_one_bad_request_fails_alone(llm, model):
    async def main():
        asked = [RED, [], [SIZE], BLUE, [3] * 100]
        return await asyncio.gather(
            *map(llm.next_token_logprobs, asked), return_exceptions=True
        )

    red, empty, outside, blue, long = asyncio.run(main())
    assert isinstance(empty, genlm.EmptySequenceError)
    assert isinstance(outside, genlm.TokenIdError)
    assert isinstance(long, genlm.ContextLengthError)
    assert all(isinstance(error, ValueError) for error in (empty, outside, long))
    assert_right(torch.stack([red, blue]), model, RED, BLUE)


def test_one_sequence_at_which_the_model_raises_fails_alone(model, tokenizer):
    def refuse(_module, _arguments, options):
        if 77 in options["input_ids"]:
            raise RuntimeError("no 77 please")

    with AsyncTransformer(model, tokenizer) as llm:
        hook = model.register_forward_pre_hook(refuse, with_kwargs=True)

        async def main():
            return await asyncio.gather(
                *map(llm.next_token_logprobs, (RED, [77, 5], BLUE)), return_exceptions=True
            )

        red, refused, blue = asyncio.run(main())
        hook.remove()
        assert isinstance(refused, genlm.EvaluationError)
        assert "no 77 please" in str(refused)
        assert_right(torch.stack([red, blue]), model, RED, BLUE)


def test_a_cancelled_request_leaves_the_others_and_the_loop_alone(llm, model):
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        tasks = [asyncio.create_task(llm.next_token_logprobs(s)) for s in (RED, RED, BLUE)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, same, other = asyncio.run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert_right(torch.stack([same, other]), model, RED, BLUE)
    assert complaints == []


def test_a_reset_ends_every_waiter_and_the_model_stays_usable(llm, model):
    async def main():
        tasks = [asyncio.create_task(llm.next_token_logprobs(s)) for s in (RED, BLUE)]
        await asyncio.sleep(0)
        llm.reset_async_queries()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended = asyncio.run(main())
    assert all(isinstance(end, genlm.QueryResetError | torch.Tensor) for end in ended)
    assert_right(llm.next_token_logprobs_sync(RED), model, RED)


class Held:
    """Holds the model's forward pass until it is let go."""

    def __init__(self, model):
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.hook = model.register_forward_pre_hook(self.wait)

    def wait(self, *_):
        self.entered.set()
        assert self.go_on.wait(60)


def test_the_event_loop_runs_while_the_model_does(llm, model):
    held = Held(model)

    async def main():
        row = asyncio.create_task(llm.next_token_logprobs(RED))
        while not held.entered.is_set():
            await asyncio.sleep(0)
        # The model is inside its forward pass, and this coroutine runs.
        assert not row.done()
        held.go_on.set()
        return await row

    row = asyncio.run(asyncio.wait_for(main(), 60))
    held.hook.remove()
    assert_right(row, model, RED)


def test_no_wake_up_is_lost_between_threads(llm, model):
    sequences = [[thread, turn] for thread in range(20, 26) for turn in range(5, 15)]

    def ask(part):
        async def main():
            return [await llm.next_token_logprobs(sequence) for sequence in part]

        return asyncio.run(asyncio.wait_for(main(), 120))

    parts = [sequences[start::6] for start in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, parts))
    for part, rows in zip(parts, answers, strict=True):
        assert_right(torch.stack(rows), model, *part)


def test_a_request_is_answered_while_others_keep_arriving(llm):
    async def main():
        first = asyncio.create_task(llm.next_token_logprobs(RED))
        others = []
        while not first.done():
            other = [3 + digit for digit in divmod(len(others), 200)]  # no two are the same
            others.append(asyncio.create_task(llm.next_token_logprobs(other)))
            await asyncio.sleep(0)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return len(others)

    assert asyncio.run(asyncio.wait_for(main(), 60)) > 0


def test_batches_leave_without_a_timer(llm):
    class Loop(asyncio.SelectorEventLoop):
        timers = 0

        def call_later(self, *args, **kwargs):
            type(self).timers += 1
            return super().call_later(*args, **kwargs)

        def call_at(self, *args, **kwargs):
            type(self).timers += 1
            return super().call_at(*args, **kwargs)

    async def main():
        await asyncio.gather(*(llm.next_token_logprobs([last]) for last in range(3, 13)))

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert Loop.timers == 0
    assert llm.statistics().largest_batch == 10


def test_an_incomplete_batch_does_not_wait_for_the_timeout(model, tokenizer):
    with AsyncTransformer(model, tokenizer, batch_size=20, timeout=3600) as llm:
        assert_right(asked_together(llm, RED, BLUE), model, RED, BLUE)


# -- bounded memory -----------------------------------------------------------------------


def test_caches_stay_within_their_bounds(model, tokenizer):
    with AsyncTransformer(model, tokenizer) as llm:
        assert llm.cache.max_entries is not None
        assert llm.cache.max_bytes is not None
        llm.cache.max_entries = 5
        asked_together(llm, *([a, b] for a in range(3, 13) for b in range(3, 13)))
        statistics = llm.statistics()
        assert statistics.cache_entries == 5
        assert statistics.engine["kv_bytes_used"] <= statistics.engine["kv_budget_bytes"]


def test_a_model_that_is_dropped_is_freed(model, tokenizer):
    llm = AsyncTransformer(model, tokenizer)
    llm.next_token_logprobs_sync(RED)
    gone = weakref.ref(llm)
    del llm
    assert gone() is None


def test_overwriting_in_a_full_output_cache_evicts_nobody():
    cache = OutputCache(2)
    cache["a"], cache["b"] = torch.zeros(1), torch.ones(1)
    cache["b"] = torch.full((1,), 2.0)
    assert cache["a"].item() == 0
    assert cache["b"].item() == 2
    assert len(cache) == 2


def test_an_output_cache_of_size_0_keeps_nothing():
    cache = OutputCache(0)
    cache["a"] = torch.zeros(1)
    assert "a" not in cache
    with pytest.raises(KeyError):
        cache["a"]


# -- samples ------------------------------------------------------------------------------


def test_draws_of_one_seeded_batch_differ_and_can_be_repeated(llm):
    def drawn():
        return asyncio.run(llm.batch_sample([RED] * 5, 8, [], seed=3))

    first = drawn()
    assert len({tuple(tokens) for tokens in first}) > 1
    assert drawn() == first


def test_temperature_0_takes_the_most_likely_tokens(llm, model):
    expected = list(RED)
    for _ in range(4):
        expected.append(int(alone(model, expected).argmax()))
    found = asyncio.run(llm.sample(RED, 4, [], temperature=0))
    assert found == expected[len(RED) :]


@pytest.mark.parametrize("made", ["served", "mock"])
def test_an_empty_batch_gives_no_rows(made, llm, tokenizer):
    model = llm if made == "served" else MockAsyncLM(tokenizer)
    assert model.batch_next_token_logprobs_sync([]).shape == (0, SIZE)
    assert asyncio.run(model.batch_next_token_logprobs([])).shape == (0, SIZE)


# -- tries --------------------------------------------------------------------------------

TOKENS = [Token(0, b"a"), Token(1, b"ab"), Token(2, b"ab"), Token(3, b"b")]


@pytest.mark.parametrize("trie_class", [TokenCharacterTrie, ParallelTokenCharacterTrie])
def test_the_largest_of_negative_weights_is_negative(trie_class):
    trie = trie_class(TOKENS)
    found = trie.weight_max(np.array([-5.0, -2.0, -3.0, -4.0]))
    assert found[trie.root] == -2
    assert found[trie.children[trie.root][ord("b")]] == -4


@pytest.mark.parametrize("trie_class", [TokenCharacterTrie, ParallelTokenCharacterTrie])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_of_low_precision_are_summed_in_a_higher_one(trie_class, dtype):
    count = 5001  # in bfloat16, 256 + 1 is 256; in float16, 5001 is 5000
    trie = trie_class([Token(i, i.to_bytes(2, "big")) for i in range(count)])
    for found in (
        trie.weight_sum(torch.ones(count, dtype=dtype)),
        trie.batch_weight_sum([torch.ones(count, dtype=dtype)])[0],
    ):
        assert found[trie.root] == count


@pytest.mark.parametrize("trie_class", [TokenCharacterTrie, ParallelTokenCharacterTrie])
def test_a_long_token_needs_no_recursion(trie_class):
    trie = trie_class([Token(0, b"x" * 5000), Token(1, b"y")])
    assert trie.weight_sum(np.array([1.0, 2.0]))[trie.root] == 3
    assert len(trie.node2prefix[trie.word2leaf[b"x" * 5000, 0]]) == 5000


def test_a_deep_tree_of_rows_needs_no_recursion():
    root = node = TokenTrie()
    for token in range(5000):
        node = node.add_token(token)
    node.past_key_values = object()
    root.clear_kv_cache()
    assert node.past_key_values is None
    assert len(repr(root)) < 100


def test_weights_of_the_wrong_length_fail_alone_in_an_asynchronous_trie():
    async def main():
        async with AsyncTokenCharacterTrie.from_vocab(TOKENS) as trie:
            return await asyncio.gather(
                *(trie.weight_sum(np.ones(n)) for n in (4, 3, 4)), return_exceptions=True
            )

    first, wrong, last = asyncio.run(main())
    assert first[-1] == last[-1] == 4
    assert isinstance(wrong, ValueError)
