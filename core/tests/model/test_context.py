"""Contexts: handles that programs extend, and what the engine keeps for them."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

import genlm
from genlm import AsyncLM, ContextLengthError, EmptySequenceError, OutputCache
from genlm.core.base.errors import TokenIdError, TokenTypeError
from genlm.core.model.leases import ContextKey, ContextLease, LeaseTable
from genlm.core.queries.member_states import MAX_WAITING
from genlm.core.scheduler import calls

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]


class KeepingEngine(ScriptedEngine):
    """Records which contexts it may let go of."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.released: list[tuple[str | None, bytes]] = []
        self.threads: set[str] = set()

    def release_context(self, adapter: str | None, key: bytes) -> None:
        self.released.append((adapter, key))
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def keeping(make_model: MakeModel) -> tuple[AsyncLM, KeepingEngine]:
    """A model without an output cache, and its engine."""
    engine = KeepingEngine(VOCAB_SIZE)
    return make_model(engine, output_cache=OutputCache(0)), engine


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(1e-3)


def released_by_now(llm: AsyncLM, engine: KeepingEngine) -> list[tuple[str | None, bytes]]:
    """What the engine let go of, once it was told of all contexts that were dropped before."""
    marker = llm.context([1, 1, 1])
    llm.next_token_logprobs_sync(marker, use_cache=False)
    leases, key = llm._requests._leases, (None, marker.sequence.key)
    assert leases is not None
    del marker
    wait_for(lambda: key not in leases._counts)
    return [released_key for released_key in engine.released.copy() if released_key != key]


def test_contexts_are_equal_if_their_models_adapters_and_tokens_are(
    make_model: MakeModel,
) -> None:
    llm, other = make_model(ScriptedEngine(VOCAB_SIZE)), make_model(ScriptedEngine(VOCAB_SIZE))
    llm.load_lora("folder", "a")
    context = llm.context([1, 2])
    assert len({context, llm.context([1]).extend(2), llm.with_lora(None).context([1, 2])}) == 1
    different: list[object] = [
        *(llm.context([2, 1]), llm.context([1, 2], lora_name="a"), other.context([1, 2])),
        *((1, 2), None),
    ]
    assert len({context, *different}) == 6
    assert context not in different


def test_the_public_example(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    ctx = llm.context([1, 2])
    child = ctx.extend(3)

    async def main() -> None:
        row = await ctx.next_token_logprobs()
        assert torch.equal(row, oracle_row([1, 2], None, VOCAB_SIZE))
        rows = await llm.batch_next_token_logprobs([child, [1, 2], np.array([1, 2, 3])])
        assert torch.equal(rows[0], oracle_row([1, 2, 3], None, VOCAB_SIZE))
        assert torch.equal(rows[0], rows[2])
        assert await child.sample(3, seed=1) == await llm.sample([1, 2, 3], 3, seed=1)

    asyncio.run(main())
    assert llm.cached_logprobs(child) is not None
    assert torch.equal(ctx.next_token_logprobs_sync(), oracle_row([1, 2], None, VOCAB_SIZE))
    assert (len(child), child.token_ids) == (3, (1, 2, 3))
    assert repr(child) == f"<Context of {llm.name!r}: 3 tokens, 1, 2, 3>"


@pytest.mark.parametrize(
    "token_ids", [[4, 5], (4, 5), np.array([4, 5]), torch.tensor([4, 5]), [np.int32(4), 5]]
)
def test_extending_by_several_ids_or_by_one_of_any_kind(
    make_model: MakeModel, token_ids: Any
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    ctx = llm.context([1])
    assert ctx.extend(token_ids) == ctx.extend(np.int64(4)).extend(torch.tensor(5))
    assert ctx.extend([]) is ctx
    assert ctx.extend(4) != ctx.extend(5)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (VOCAB_SIZE, TokenIdError),
        (-1, TokenIdError),
        ([3, VOCAB_SIZE], TokenIdError),
        (True, TokenTypeError),
        (torch.tensor(True), TokenTypeError),
        (torch.tensor([True]), TokenTypeError),
        (1.5, TokenTypeError),
        ("a", TokenTypeError),
        ([1.5], TokenTypeError),
        (None, TokenTypeError),
    ],
)
def test_wrong_extensions_are_refused(
    make_model: MakeModel, wrong: Any, error: type[Exception]
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    with pytest.raises(error):
        llm.context([1]).extend(wrong)


def test_wrong_contexts_are_refused(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE, max_context=3))
    with pytest.raises(EmptySequenceError):
        llm.context([])
    with pytest.raises(TokenIdError):
        llm.context([VOCAB_SIZE])
    with pytest.raises(ContextLengthError) as too_long:
        llm.context([1] * 4)
    assert (too_long.value.length, too_long.value.max_context) == (4, 3)
    long = make_model(ScriptedEngine(VOCAB_SIZE, max_context=80))
    long.next_token_logprobs_sync([1] * 80)
    with pytest.raises(ContextLengthError):
        long.context([1] * 81)
    full = llm.context([1] * 3)
    full.next_token_logprobs_sync()
    longer = full.extend(1)  # the last token of a text, which nobody asks
    with pytest.raises(ContextLengthError):
        longer.next_token_logprobs_sync()
    with pytest.raises(TypeError, match="token_ids"):
        pickle.dumps(full)
    assert copy.copy(full) is full
    assert copy.deepcopy([full])[0] is full


# -- what the engine keeps ------------------------------------------------------------


def test_the_engine_is_told_when_the_last_reference_goes(keeping: Any) -> None:
    llm, engine = keeping
    ctx = llm.context([1, 2])
    equal = llm.context([1]).extend(2)
    for context in (ctx, equal):
        context.next_token_logprobs_sync()
    key = ctx.sequence.key
    del ctx, context
    gc.collect()
    llm.next_token_logprobs_sync([3])
    assert engine.released == []  # the equal context still refers to it
    del equal
    wait_for(lambda: engine.released == [(None, key)])  # although nobody asks anything
    assert engine.threads == {f"genlm-{llm.name}"}


ASK: dict[str, Callable[[AsyncLM, Any], Any]] = {
    "row": lambda llm, ctx: asyncio.run(llm.next_token_logprobs(ctx)),
    "row and wait": lambda llm, ctx: llm.next_token_logprobs_sync(ctx),
    "rows": lambda llm, ctx: asyncio.run(llm.batch_next_token_logprobs([[7], ctx])),
    "reduction": lambda llm, ctx: asyncio.run(llm.top_tokens(ctx, 1)),
    "reduction and wait": lambda llm, ctx: llm.top_tokens_sync(ctx, 1),
    "reductions": lambda llm, ctx: llm.batch_top_tokens_sync([[7], ctx], 1),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_a_context_that_the_output_cache_answers_shares_what_the_engine_keeps(
    make_model: MakeModel, ask: Callable[[AsyncLM, Any], Any]
) -> None:
    engine = KeepingEngine(VOCAB_SIZE)
    llm = make_model(engine)
    ctx, equal, last = (llm.context([1, 2]) for _ in range(3))
    key = ctx.sequence.key
    ctx.next_token_logprobs_sync()
    ask(llm, equal)
    assert sum((1, 2) in batch for batch in engine.batches) == 1
    del ctx
    assert released_by_now(llm, engine) == []
    del equal
    assert released_by_now(llm, engine) == [(None, key)]
    ask(llm, last)  # nothing is kept for it any more
    del last
    assert released_by_now(llm, engine) == [(None, key)]


def test_what_was_never_asked_and_lists_are_not_released(keeping: Any) -> None:
    llm, engine = keeping
    llm.context([1, 2]).extend(3)
    llm.next_token_logprobs_sync([1, 2, 3])
    llm.next_token_logprobs_sync([4])
    assert engine.released == []


def test_a_context_is_kept_for_its_extensions_until_they_are_asked(keeping: Any) -> None:
    llm, engine = keeping
    ctx = llm.context([1])
    ctx.next_token_logprobs_sync()
    key = ctx.sequence.key
    grandchild = ctx.extend(2).extend([3, 4])
    del ctx
    llm.next_token_logprobs_sync([5])
    assert engine.released == []
    grandchild.next_token_logprobs_sync()
    wait_for(lambda: engine.released == [(None, key)])
    del grandchild
    wait_for(lambda: len(engine.released) == 2)


def test_releases_come_after_the_requests_that_arrived_before(keeping: Any) -> None:
    llm, engine = keeping
    order: list[Any] = []
    submit, release = engine.submit, engine.release_context
    engine.submit = lambda query: (order.append(query.token_ids), submit(query))
    engine.release_context = lambda *key: (order.append("released"), release(*key))

    async def main() -> None:
        ctx = llm.context([1])
        await ctx.next_token_logprobs()
        ctx = ctx.extend(2)
        await ctx.next_token_logprobs()
        await llm.next_token_logprobs([7])

    asyncio.run(main())
    assert order.index((1, 2)) < order.index("released")


def test_many_contexts_dropped_at_once_are_all_released(keeping: Any) -> None:
    llm, engine = keeping
    contexts = [llm.context([1, i % VOCAB_SIZE, i // VOCAB_SIZE]) for i in range(200)]
    llm.batch_next_token_logprobs_sync(contexts)
    keys = {(None, context.sequence.key) for context in contexts}
    del contexts
    gc.collect()
    wait_for(lambda: set(engine.released) == keys)
    assert len(engine.released) == len(keys)
    leases = llm._requests._leases
    assert leases is not None
    assert leases._counts == {}


def test_contexts_of_members_that_wait_are_kept_for_some_queries(keeping: Any) -> None:
    llm, engine = keeping
    population = llm.population([[1], [2], [3]])
    population.draw_sync()
    waiting = {(None, member.sequence.key) for member in population[1:]}
    kept = []
    for _ in range(20):
        population = population.extend([4, -1, 5])
        population[:1].draw_sync()
        kept.append(waiting.difference(released_by_now(llm, engine)))
    assert kept == [waiting] * MAX_WAITING + [set()] * (20 - MAX_WAITING)


def test_contexts_of_sampled_members_are_kept_while_they_wait(keeping: Any) -> None:
    llm, engine = keeping
    population = llm.population([[1], [2]]).sample_sync(3, stop=()).population
    first, second = (llm.context(member.token_ids[:-1]).sequence.key for member in population)
    population[:1].draw_sync()
    assert (None, first) in released_by_now(llm, engine)  # the engine has its extension
    assert (None, second) not in engine.released
    del population
    assert (None, second) in released_by_now(llm, engine)


def test_contexts_dropped_before_each_step_schedule_one_wake_up_at_a_time(
    keeping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, engine = keeping
    scheduled: deque[Callable[[], None]] = deque()
    monkeypatch.setattr(calls, "run_in_background", scheduled.append)
    for token in range(4):
        llm.context([1, token]).next_token_logprobs_sync()
        llm.next_token_logprobs_sync([2, token])
        assert len(engine.released) == token + 1
    assert len(scheduled) == 1
    scheduled.pop()()
    llm.context([3]).next_token_logprobs_sync()
    scheduled.pop()()
    wait_for(lambda: len(engine.released) == 5)


def test_an_engine_that_fails_to_release_goes_on(keeping: Any, caplog: Any) -> None:
    llm, engine = keeping

    def fail(*_key: Any) -> None:
        engine.released.append(_key)
        raise RuntimeError("release failed")

    engine.release_context = fail
    llm.context([1]).next_token_logprobs_sync()
    wait_for(lambda: bool(engine.released))
    llm.next_token_logprobs_sync([2])
    assert "release failed" in caplog.text


def test_a_release_that_fails_does_not_prevent_others(keeping: Any, caplog: Any) -> None:
    llm, engine = keeping
    release = engine.release_context

    def release_others(adapter: str | None, key: bytes) -> None:
        if len(key) == 4:
            raise RuntimeError("release failed")
        release(adapter, key)

    engine.release_context = release_others
    population = llm.population([[1], [1, 2], [3], [3, 4]])  # one lease
    released = {(None, member.sequence.key) for member in population[1::2]}
    population.draw_sync()
    del population
    gc.collect()
    wait_for(lambda: set(engine.released) == released)
    assert caplog.text.count("RuntimeError: release failed") == 2


def test_contexts_dropped_after_close_need_nobody(keeping: Any) -> None:
    llm, engine = keeping
    ctx = llm.context([1])
    ctx.next_token_logprobs_sync()
    llm.close()
    del ctx
    gc.collect()
    assert engine.released == []


def test_a_context_keeps_its_model_alive() -> None:
    ctx = genlm.load_model("demo", backend="reference").context([1, 2])
    gc.collect()
    assert ctx.next_token_logprobs_sync().shape == (257,)


KEY = (None, b"1234")


OTHER = (None, b"5678")


class Drops:
    """Leases, the keys of those that were dropped, and an engine that records releases."""

    def __init__(self) -> None:
        self.leases, self.engine = LeaseTable(), KeepingEngine(VOCAB_SIZE)
        self.dropped: list[tuple[ContextKey, ...]] = []
        self.leases.on_drop = self.dropped.append

    def released(self) -> list[ContextKey]:
        """What the engine releases when it handles the drops up to now."""
        dropped, self.dropped[:] = self.dropped.copy(), []
        self.leases.release(self.engine, dropped)
        released, self.engine.released = self.engine.released, []
        return released


def test_a_context_is_released_with_its_last_lease() -> None:
    drops = Drops()
    first, second = drops.leases.lease([KEY]), drops.leases.find(KEY)
    assert second is not None
    del first
    assert drops.released() == []
    del second
    assert drops.released() == [KEY]
    assert drops.leases.find(KEY) is None


def test_a_context_that_is_leased_again_before_its_drop_is_handled_is_not_released() -> None:
    drops = Drops()
    drops.leases.lease([KEY])  # dropped at once
    lease = drops.leases.lease([KEY])
    assert drops.dropped == [(KEY,)]
    assert drops.released() == []
    del lease
    assert drops.released() == [KEY]
    assert drops.leases._counts == {}


def test_a_lease_of_many_contexts_is_released_in_one_call() -> None:
    drops = Drops()
    other = drops.leases.lease([OTHER])
    many = drops.leases.lease([KEY, OTHER, KEY])
    del many
    assert drops.dropped == [(KEY, OTHER, KEY)]
    assert drops.released() == [KEY]
    del other
    assert drops.released() == [OTHER]


def test_a_drop_takes_no_lock_which_its_thread_may_have() -> None:
    drops = Drops()
    lease = drops.leases.lease([KEY])
    with drops.leases._lock:  # as when garbage is collected within the table
        del lease
    assert drops.released() == [KEY]


def test_threads_count_leases_without_losing_any() -> None:
    drops, keys = Drops(), [(None, bytes([i])) for i in range(3)]
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait(TIMEOUT_S)
        leases: deque[ContextLease | None] = deque(maxlen=2)
        for turn in range(3000):
            key = keys[(turn * 7 + thread) % 3]
            leases.append(drops.leases.lease([key]))
            leases.append(drops.leases.find(key))

    switching_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(switching_s)
    assert len(drops.dropped) == 4 * 3000 * 2
    assert sorted(drops.released()) == keys
    assert drops.leases._counts == {}


# -- keys, lists ----------------------------------------------------------------------


def test_long_lists_are_found_again_and_still_checked(keeping: Any) -> None:
    llm, engine = keeping
    ids = [i % VOCAB_SIZE for i in range(100)]
    for token_id in (1, 2, 3):
        llm.next_token_logprobs_sync(ids)
        ids.append(token_id)
        row = llm.next_token_logprobs_sync(tuple(ids))
        assert torch.equal(row, oracle_row(ids, None, VOCAB_SIZE))
    for wrong, error in [(VOCAB_SIZE, TokenIdError), (1.0, TokenTypeError)]:
        with pytest.raises(error):
            llm.next_token_logprobs_sync([*ids, wrong])
    assert [tuple(ids)] in engine.batches
