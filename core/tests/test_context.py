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
from genlm.core import context as context_module
from genlm.core.context import ContextKey, Hold, Holds
from genlm.core.errors import TokenIdError, TokenTypeError

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
    llm.next_token_logprobs_uncached_sync(marker)
    holds, key = llm._requests._holds, (None, marker.sequence.key)
    assert holds is not None
    del marker
    wait_for(lambda: key not in holds._by_key)
    return [each for each in engine.released.copy() if each != key]


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
    "several", [[4, 5], (4, 5), np.array([4, 5]), torch.tensor([4, 5]), [np.int32(4), 5]]
)
def test_extending_by_several_ids_or_by_one_of_any_kind(
    make_model: MakeModel, several: Any
) -> None:
    llm = make_model(ScriptedEngine(VOCAB_SIZE))
    ctx = llm.context([1])
    assert ctx.extend(several) == ctx.extend(np.int64(4)).extend(torch.tensor(5))
    assert ctx.extend([]) is ctx
    assert ctx.extend(4) != ctx.extend(5)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (VOCAB_SIZE, TokenIdError),
        (-1, TokenIdError),
        ([3, VOCAB_SIZE], TokenIdError),
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
    with pytest.raises(ContextLengthError):
        llm.context([1] * 4)
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
    for each in (ctx, equal):
        each.next_token_logprobs_sync()
    key = ctx.sequence.key
    del ctx, each
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
    "reduction": lambda llm, ctx: asyncio.run(llm.top_k(ctx, 1)),
    "reduction and wait": lambda llm, ctx: llm.top_k_sync(ctx, 1),
    "reductions": lambda llm, ctx: llm.batch_top_k_sync([[7], ctx], 1),
}


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_a_context_that_the_output_cache_answers_shares_what_the_engine_keeps(
    make_model: MakeModel, ask: Callable[[AsyncLM, Any], Any]
) -> None:
    engine = KeepingEngine(VOCAB_SIZE)
    llm = make_model(engine)
    ctx, equal, after = (llm.context([1, 2]) for _ in range(3))
    key = ctx.sequence.key
    ctx.next_token_logprobs_sync()
    ask(llm, equal)
    assert sum((1, 2) in batch for batch in engine.batches) == 1
    del ctx
    assert released_by_now(llm, engine) == []
    del equal
    assert released_by_now(llm, engine) == [(None, key)]
    ask(llm, after)  # nothing is kept for it any more
    del after
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
    keys = {(None, each.sequence.key) for each in contexts}
    del contexts
    gc.collect()
    wait_for(lambda: set(engine.released) == keys)
    assert len(engine.released) == len(keys)
    assert len(llm._requests._holds._by_key) == 0


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


class Drops:
    """Holds, the keys of those that died, and an engine that records what it lets go of."""

    def __init__(self) -> None:
        self.holds, self.engine = Holds(), KeepingEngine(VOCAB_SIZE)
        self.keys: list[ContextKey] = []
        self.holds.on_drop = self.keys.append

    def released(self) -> list[ContextKey]:
        """What the engine lets go of when it handles the drops up to now."""
        keys, self.keys[:] = self.keys.copy(), []
        self.holds.release(self.engine, keys)
        released, self.engine.released = self.engine.released, []
        return released


def test_a_drop_that_is_handled_at_once_is_not_lost() -> None:
    drops = Drops()
    found: list[list[ContextKey]] = []

    def handled(key: ContextKey) -> None:  # as by the engine's thread
        drops.keys.append(key)
        found.append(drops.released())

    drops.holds.on_drop = handled
    drops.holds.of(KEY)
    assert found == [[KEY]]


def test_a_hold_that_dies_while_its_context_is_held_again_is_not_handed_out() -> None:
    drops = Drops()
    others: list[Hold] = []

    def held_again(key: ContextKey) -> None:  # as by another thread
        drops.holds.on_drop = drops.keys.append
        drops.keys.append(key)
        others.append(drops.holds.of(key))

    drops.holds.on_drop = held_again
    drops.holds.of(KEY)
    assert drops.keys == [KEY]
    assert drops.released() == []
    assert drops.holds.of(KEY) is others[0]
    others.clear()
    assert drops.keys == [KEY]
    assert drops.released() == [KEY]


def test_the_drop_of_an_earlier_hold_leaves_a_later_one_alone() -> None:
    drops = Drops()
    drops.holds.of(KEY)
    hold = drops.holds.of(KEY)
    assert drops.keys == [KEY]
    assert drops.released() == []
    assert drops.holds.of(KEY) is hold
    del hold
    assert drops.keys == [KEY]
    assert drops.released() == [KEY]
    assert drops.holds._by_key == {}


def test_holds_are_made_and_released_under_the_lock_alone() -> None:
    class LockedKey(tuple[Any, ...]):
        def __hash__(self) -> int:
            assert drops.holds._lock.locked()
            return super().__hash__()

    drops, key = Drops(), LockedKey(KEY)
    drops.holds.of(key)  # type: ignore[arg-type]
    assert drops.released() == [KEY]


def test_threads_share_the_holds_that_live_and_each_that_died_is_dropped_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[None] = []

    class Counted(Hold):
        def __init__(self) -> None:
            made.append(None)

    monkeypatch.setattr(context_module, "Hold", Counted)
    drops, keys = Drops(), [(None, bytes([i])) for i in range(3)]
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait(TIMEOUT_S)
        kept: deque[tuple[ContextKey, Hold]] = deque(maxlen=2)
        for turn in range(3000):
            key = keys[(turn * 7 + thread) % 3]
            kept.append((key, drops.holds.of(key)))
            for key, hold in kept:
                assert drops.holds.of(key) is hold
            if turn % 5 == thread:
                kept.clear()

    switching_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(switching_s)
    assert len(drops.keys) == len(made)
    assert set(drops.released()) == set(keys)
    assert drops.holds._by_key == {}


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
