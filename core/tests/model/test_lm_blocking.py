"""Each method that waits has an asynchronous and a blocking form, derived in one way."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import AsyncLM, Capability, EngineClosedError, OutputCache, Population, Query
from genlm.core.base.blocking import blocking, blocking_iterator, run_blocking, wait_for
from genlm.core.scheduler import Scheduler, background

MakeModel = Callable[..., AsyncLM]

ASYNC_OF = {
    **{name: f"a{name}" for name in ("load_lora", "pin_prefix", "clear_kv_cache", "close")},
    "update_weights": "aupdate_weights",
    **{name: name.removesuffix("_sync") for name in dir(AsyncLM) if name.endswith("_sync")},
}


class PrefixEngine(ScriptedEngine):
    capabilities = frozenset({Capability.LORA, Capability.PREFIX_CACHE})

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: list[tuple[int, ...]] = []

    def cache_prefix(self, token_ids: Any, adapter: str | None) -> None:
        self.prefixes.append(tuple(token_ids))

    def clear_prefix_cache(self) -> None:
        self.prefixes.clear()


def test_every_coroutine_method_has_a_blocking_twin_of_its_signature() -> None:
    public = {name: getattr(AsyncLM, name) for name in dir(AsyncLM) if name[0] != "_"}
    coroutines = {
        name for name, member in public.items() if inspect.iscoroutinefunction(member)
    }
    assert coroutines == set(ASYNC_OF.values())
    assert len(coroutines) >= 20
    for name, of in ASYNC_OF.items():
        twin = public[name]
        assert not inspect.iscoroutinefunction(twin)
        assert inspect.signature(twin) == inspect.signature(public[of])
        assert twin.__name__ == name
        assert f"`{of}`" in twin.__doc__
        assert public[of].__doc__.strip().partition("\n")[0] in twin.__doc__
        assert "Args:" in twin.__doc__ or "Args:" not in public[of].__doc__


@pytest.mark.parametrize("public_class", [AsyncLM, Population])
def test_errors_of_python_name_the_public_class(public_class: type) -> None:
    public = {name: getattr(public_class, name) for name in dir(public_class) if name[0] != "_"}
    methods = {name: member for name, member in public.items() if inspect.isfunction(member)}
    assert len(methods) >= 20
    for name, method in methods.items():
        assert method.__qualname__ == f"{public_class.__name__}.{name}"
    with pytest.raises(TypeError, match=rf"^{public_class.__name__}\.top_tokens\(\) missing"):
        public["top_tokens"]()


def test_a_blocking_method_works_within_a_running_event_loop_and_on_threads(
    make_model: MakeModel,
) -> None:
    llm = make_model(ScriptedEngine(), output_cache=OutputCache(0))

    def row_after(token_id: int) -> torch.Tensor:
        return llm.next_token_logprobs_sync([token_id])

    async def main() -> torch.Tensor:
        first = await llm.next_token_logprobs([1])
        return torch.stack([first, row_after(2), await asyncio.to_thread(row_after, 3)])

    with ThreadPoolExecutor(4) as pool:
        rows = [*asyncio.run(main()), *pool.map(row_after, range(4, 12))]
    for token_id, row in enumerate(rows, 1):
        torch.testing.assert_close(row, oracle_row([token_id], None, 16))


def test_ctrl_c_ends_the_wait_for_a_continuation_and_drops_it(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    llm = make_model(engine)
    engine.hold()

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        engine.wait_until_entered()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.batch_sample_sync([[1], [2]], 5)
    assert llm.statistics().pending == 0
    assert llm.statistics().abandoned == 1  # one request, for all continuations
    engine.release()
    torch.testing.assert_close(llm.next_token_logprobs_sync([3]), oracle_row([3], None, 16))


def test_ctrl_c_is_handled_between_waits_on_windows(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.14, Ctrl-C ends no wait there, so each wait has a timeout."""
    result = Future.result

    def wait(future: Future[Any], timeout: float | None = None) -> Any:
        assert timeout is not None or future.done()
        return result(future, timeout)

    monkeypatch.setattr(Future, "result", wait)
    llm = make_model(PrefixEngine())
    llm.pin_prefix([1, 2])
    torch.testing.assert_close(llm.next_token_logprobs_sync([3]), oracle_row([3], None, 16))


def test_a_wait_is_continued_until_the_result_arrives() -> None:
    class Slow(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            try:
                return super().result(0)
            except TimeoutError:
                self.set_result(7)
                raise

    def caller(_held: object) -> int:
        return wait_for(Slow())

    held = Slow()
    gone = weakref.ref(held)
    assert caller(held) == 7
    del held
    assert gone() is None, "the traceback of the wait keeps objects of its callers"
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("of the engine"))
    with pytest.raises(TimeoutError, match="of the engine"):
        wait_for(failed)


def test_a_time_limit_of_a_signal_handler_ends_the_wait() -> None:
    class Interrupted(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            self.set_result(7)
            raise TimeoutError("the time limit of the program")

    with pytest.raises(TimeoutError, match="the time limit of the program"):
        wait_for(Interrupted())
    failed: Future[int] = Future()
    with pytest.raises(TimeoutError) as raised:  # of a wait in an engine
        Future[int]().result(0)
    failed.set_exception(raised.value)
    with pytest.raises(TimeoutError):
        wait_for(failed)


def test_a_blocking_method_is_refused_on_the_engines_own_thread(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine())
    for ask in (
        lambda _: llm.next_token_logprobs_sync([1]),
        lambda _: llm.batch_sample_sync([[1]], 2),
        lambda _: llm.load_lora("folder"),
    ):
        with pytest.raises(RuntimeError, match="own thread"):
            llm._scheduler.run(ask)


class Suspending:
    """Can be awaited by an event loop only."""

    def __await__(self) -> Iterator[None]:
        yield


def test_a_twin_of_a_method_that_needs_an_event_loop_says_so() -> None:
    class Sleeper:
        async def nap(self) -> None:
            await Suspending()

        nap_sync = blocking(nap)

    with pytest.raises(RuntimeError, match="runs without an event loop"):
        Sleeper().nap_sync()

    closed = []

    async def naps() -> AsyncIterator[int]:
        try:
            await Suspending()
            yield 1
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match="runs without an event loop") as _caught:
        next(blocking_iterator(naps)())
    assert closed == [True]

    async def failing() -> None:
        raise LookupError("as it is")

    with pytest.raises(LookupError, match="as it is"):
        run_blocking(failing())


def test_a_coroutine_without_an_event_loop_of_asyncio_says_so(make_model: MakeModel) -> None:
    llm = make_model(ScriptedEngine())
    with pytest.raises(RuntimeError, match=r"event loop of asyncio.*suffix _sync"):
        llm.next_token_logprobs([1]).send(None)


@pytest.mark.parametrize(
    "wait",
    [
        lambda llm: llm.aload_lora("folder", "a"),
        lambda llm: llm.apin_prefix([1, 2]),
        lambda llm: llm.aclear_kv_cache(),
        lambda llm: llm.aclose(),
    ],
    ids=["load", "keep", "clear", "close"],
)
def test_the_event_loop_runs_on_while_the_engine_loads_keeps_and_closes(
    make_model: MakeModel, wait: Callable[[AsyncLM], Any]
) -> None:
    engine = PrefixEngine()
    llm = make_model(engine)

    async def main() -> None:
        engine.hold()
        step = asyncio.ensure_future(llm.next_token_logprobs([1]))
        await asyncio.to_thread(engine.wait_until_entered)
        task = asyncio.ensure_future(wait(llm))  # behind a step that only this loop can end
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        engine.release()
        async with asyncio.timeout(TIMEOUT_S):
            await task
            await asyncio.gather(step, return_exceptions=True)

    asyncio.run(main())


def test_both_forms_do_the_same(make_model: MakeModel) -> None:
    async def main() -> None:
        await llm.aload_lora("folder", "b")
        await llm.apin_prefix([3], lora_name="b")
        assert (llm.lora_names, engine.prefixes) == (("a", "b"), [(3,)])
        await llm.aclear_kv_cache()
        assert engine.prefixes == []
        await llm.aclose()
        with pytest.raises(EngineClosedError):
            await llm.next_token_logprobs([1])

    engine = PrefixEngine()
    llm = make_model(engine)
    llm.load_lora("folder", lora_name="a")
    llm.pin_prefix([1, 2], lora_name="a")
    assert (llm.lora_names, engine.prefixes) == (("a",), [(1, 2)])
    llm.clear_kv_cache()
    assert engine.prefixes == []
    asyncio.run(main())
    llm.close()
    assert engine.closed


def test_a_group_of_any_kind_is_answered_by_its_id() -> None:
    """The scheduler takes whatever has an id, and returns what the engine says."""

    class Group:
        query_id = 12345

    class GroupEngine(ScriptedEngine):
        def submit(self, query: Any) -> None:
            self.group = query if isinstance(query, Group) else None
            if self.group is None:
                super().submit(query)

        def step(self) -> Any:
            from genlm import Completion

            if self.group is not None:
                return [Completion(self.group.query_id, {"of": self.group})]  # type: ignore[arg-type]
            return super().step()

    scheduler, group = Scheduler(GroupEngine), Group()
    assert asyncio.run(scheduler.answer(group)) == {"of": group}
    assert run_blocking(scheduler.answer(group)) == {"of": group}
    assert run_blocking(scheduler.answer(Query(7, (1,)))).shape == (16,)
    scheduler.close()


def test_the_thread_of_finalizers_starts_with_a_model_and_not_in_a_finalizer(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_background", background._Background())
    called = threading.Event()
    threads = set(threading.enumerate())
    background.run_in_background(called.set)
    assert set(threading.enumerate()) == threads
    make_model(ScriptedEngine())
    assert called.wait(TIMEOUT_S)


@pytest.mark.parametrize("error", [ArithmeticError("no"), SystemExit(3)])
def test_functions_that_raise_do_not_end_the_thread_of_finalizers(
    error: BaseException, make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    make_model(ScriptedEngine())
    called = threading.Event()
    with caplog.at_level(logging.CRITICAL, "genlm"):
        background.run_in_background(fail)
        background.run_in_background(called.set)
        assert called.wait(TIMEOUT_S)
