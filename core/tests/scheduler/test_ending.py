"""Laws: `close`, `cancel_all` and the interpreter's exit leave no waiter hanging."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from programs import run_code, run_program
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm import AsyncLM, EngineClosedError, OutputCache, QueryResetError
from genlm.core.scheduler.worker import Worker


def start_waiters(llm, engine, pool):
    """One request that the engine works on and one in the inbox, from two threads."""
    engine.hold()
    working = pool.submit(llm.next_token_logprobs_sync, [1])
    engine.wait_until_entered()
    queued = pool.submit(asyncio.run, llm.next_token_logprobs([2]))
    while llm.statistics().pending < 2:
        pass
    return working, queued


def test_close_fails_all_waiters_at_once_and_ends_the_thread(start):
    llm, engine = start()
    with ThreadPoolExecutor(3) as pool:
        waiters = start_waiters(llm, engine, pool)
        closing = pool.submit(llm.close)
        for waiter in waiters:  # answered although the engine is still held in its step
            with pytest.raises(EngineClosedError):
                waiter.result(TIMEOUT_S)
        assert not closing.done()
        engine.release()
        closing.result(TIMEOUT_S)
    assert engine.closed
    assert not any(thread.name == f"genlm-{llm.name}" for thread in threading.enumerate())


def test_closing_twice_is_allowed_and_asking_afterwards_is_an_error(start):
    llm, _ = start(output_cache=OutputCache(10))
    llm.next_token_logprobs_sync([1])
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="load the model again"):
        llm.next_token_logprobs_sync([1])
    with pytest.raises(EngineClosedError):
        asyncio.run(llm.next_token_logprobs([1]))
    with pytest.raises(EngineClosedError):
        llm.load_lora("folder")
    assert llm.statistics().requests >= 1


def test_reset_fails_all_waiters_and_leaves_the_model_usable(start):
    llm, engine = start()
    with ThreadPoolExecutor(2) as pool:
        waiters = start_waiters(llm, engine, pool)
        llm.cancel_all()
        for waiter in waiters:
            with pytest.raises(QueryResetError):
                waiter.result(TIMEOUT_S)
    assert llm.statistics().pending == 0
    engine.release()
    torch.testing.assert_close(llm.next_token_logprobs_sync([1]), oracle_row([1], None, 16))
    assert len(engine.aborted) == 1


def test_a_call_on_the_engines_thread_that_close_overtakes_is_an_error(start):
    llm, engine = start()
    engine.hold()
    with ThreadPoolExecutor(3) as pool:
        request = pool.submit(llm.next_token_logprobs_sync, [1])
        engine.wait_until_entered()
        loading = pool.submit(llm.load_lora, "folder")
        while not llm._scheduler._worker._calls:
            pass
        closing = pool.submit(llm.close)
        with pytest.raises(EngineClosedError):
            loading.result(TIMEOUT_S)
        engine.release()
        closing.result(TIMEOUT_S)
        with pytest.raises(EngineClosedError):
            request.result(TIMEOUT_S)


def test_a_call_on_the_engines_thread_may_close_the_model(start, caplog):
    llm, engine = start()
    engine.hold()
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(llm.next_token_logprobs_sync, [1])
        engine.wait_until_entered()
        worker = llm._scheduler._worker
        closing, later = worker.call(lambda _: llm.close()), worker.call(lambda _: None)
        engine.release()
        closing.result(TIMEOUT_S)
        torch.testing.assert_close(request.result(TIMEOUT_S), oracle_row([1], None, 16))
        with pytest.raises(EngineClosedError):
            later.result(TIMEOUT_S)
    llm.close()
    assert engine.closed
    assert caplog.records == []


def test_the_context_managers_close():
    engine = ScriptedEngine()
    with AsyncLM(lambda: engine):
        assert not engine.closed
    assert engine.closed

    async_engine = ScriptedEngine()

    async def main():
        async with AsyncLM(lambda: async_engine) as llm:
            await llm.next_token_logprobs([1])

    asyncio.run(main())
    assert async_engine.closed


def test_a_model_that_is_dropped_without_close_ends_its_thread():
    llm = AsyncLM(ScriptedEngine, name="dropped")
    llm.next_token_logprobs_sync([1])
    thread = next(t for t in threading.enumerate() if t.name == "genlm-dropped")
    del llm
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_models_share_one_background_thread():
    def count():
        return sum(thread.name == "genlm-reaper" for thread in threading.enumerate())

    with AsyncLM(ScriptedEngine):
        before = count()
        with AsyncLM(ScriptedEngine):
            assert count() == before > 0


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("closed", [True, False])
def test_what_is_dropped_is_freed_at_once(closed):
    llm = AsyncLM(ScriptedEngine, name="freed")
    llm.next_token_logprobs_sync([1])
    engine = weakref.ref(llm._scheduler.engine)
    thread = next(t for t in threading.enumerate() if t.name == "genlm-freed")
    if closed:
        llm.close()
    del llm
    thread.join(TIMEOUT_S)
    assert engine() is None


@pytest.mark.usefixtures("no_garbage_collection")
def test_an_engine_that_could_not_be_built_is_freed_at_once():
    built = []

    def build():
        engine = ScriptedEngine()
        built.append(weakref.ref(engine))
        raise MemoryError

    with contextlib.suppress(MemoryError):
        AsyncLM(build, name="never-built")
    for thread in threading.enumerate():
        if thread.name == "genlm-never-built":
            thread.join(TIMEOUT_S)
    assert built[0]() is None


def test_cached_rows_are_freed_although_a_library_stores_an_error_of_the_engines_thread():
    errors = []

    def build():
        try:
            raise ImportError
        except ImportError as error:
            errors.append(error)
        return ScriptedEngine()

    with AsyncLM(build) as llm:
        llm.next_token_logprobs_sync([1])
        cache = weakref.ref(llm.output_cache)
    del llm
    gc.collect()
    assert cache() is None


def test_a_bound_model_keeps_the_engine_alive():
    engine = ScriptedEngine()
    llm = AsyncLM(lambda: engine)
    llm.load_lora("folder", "a")
    bound = llm.with_lora("a")
    del llm
    gc.collect()
    row = bound.next_token_logprobs_sync([1])
    torch.testing.assert_close(row, oracle_row([1], "a", 16))
    bound.close()


@pytest.mark.parametrize("ending", ["", "sys.exit(3)"])
def test_the_interpreter_exits_with_requests_unanswered(ending, pytestconfig):
    program = textwrap.dedent("""
        import asyncio, atexit, sys, threading
        atexit.register(lambda: waiter.join(30))  # first registered, last called
        sys.path.insert(0, sys.argv[1])
        from scripted import ScriptedEngine
        from genlm import AsyncLM, EngineClosedError

        class Announcing(ScriptedEngine):
            def close(self):
                print("closed", flush=True)

        engine = Announcing()

        def build():
            atexit.register(print, "library", flush=True)  # as when Ray is imported
            return engine

        llm = AsyncLM(build)
        engine.hold()

        def ask():
            try:
                llm.next_token_logprobs_sync([1])
            except EngineClosedError:
                print("told", flush=True)
                engine.release()

        waiter = threading.Thread(target=ask, daemon=True)
        waiter.start()
        engine.wait_until_entered()

        async def main():
            asyncio.create_task(llm.next_token_logprobs([2]))
            await asyncio.sleep(0)

        asyncio.run(main())
    """)
    support = str(pytestconfig.rootpath / "tests/support")
    status = 3 if ending else 0
    done = run_code(program + ending, support, status=status, timeout=TIMEOUT_S)
    assert done.stderr == ""
    assert done.stdout.split() == ["told", "closed", "library"]


def test_an_exit_handler_may_close_a_model_that_the_exit_has_closed(pytestconfig):
    program = textwrap.dedent("""
        import atexit, sys
        atexit.register(lambda: llm.close())  # registered before the model is loaded
        sys.path.insert(0, sys.argv[1])
        from scripted import ScriptedEngine
        from genlm import AsyncLM

        llm = AsyncLM(ScriptedEngine)
    """)
    support = str(pytestconfig.rootpath / "tests/support")
    assert run_code(program, support, timeout=TIMEOUT_S).stderr == ""


def test_an_exit_handler_uses_a_model_that_was_loaded_before_its_registration(pytestconfig):
    program = textwrap.dedent("""
        import atexit, sys
        sys.path.insert(0, sys.argv[1])
        from scripted import ScriptedEngine
        from genlm import AsyncLM

        llm = AsyncLM(ScriptedEngine)
        atexit.register(lambda: print(len(llm.next_token_logprobs_sync([1]))))
        other = AsyncLM(ScriptedEngine)
    """)
    support = str(pytestconfig.rootpath / "tests/support")
    done = run_code(program, support, timeout=TIMEOUT_S)
    assert done.stderr == ""
    assert done.stdout.split() == ["16"]


def test_an_exit_handler_may_wait_for_a_thread_that_closes_a_model(pytestconfig):
    program = textwrap.dedent("""
        import atexit, sys, threading
        atexit.register(lambda: closing.join())  # registered before the model is loaded
        sys.path.insert(0, sys.argv[1])
        from scripted import ScriptedEngine
        from genlm import AsyncLM

        class Closing(ScriptedEngine):
            def close(self):
                has_begun.set()
                while not worker._is_exiting:
                    pass

        has_begun = threading.Event()
        llm = AsyncLM(Closing)
        worker = llm._scheduler._worker
        closing = threading.Thread(target=llm.close, daemon=True)
        closing.start()
        has_begun.wait()
    """)
    support = str(pytestconfig.rootpath / "tests/support")
    assert run_code(program, support, timeout=TIMEOUT_S).stderr == ""


@pytest.mark.parametrize("method", ["close", "statistics"])
@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
def test_an_engine_that_raises_while_it_is_closed_ends(start, method, error, caplog):
    def fail(*_):
        raise error

    llm, _ = start(type("Failing", (ScriptedEngine,), {method: fail})())
    with caplog.at_level(logging.CRITICAL, "genlm"):
        llm.close()
    assert llm._scheduler._worker.ended.is_set()  # the exit of the interpreter waits for it


def test_a_thread_does_not_end_while_the_interpreter_is_finalised(pytestconfig):
    """Its native thread-local variables may have destructors that need the interpreter."""
    program = textwrap.dedent("""
        import atexit, sys
        atexit.register(lambda: print(thread.is_alive()))  # first registered, last called
        sys.path.insert(0, sys.argv[1])
        from scripted import ScriptedEngine
        from genlm import AsyncLM

        llm = AsyncLM(ScriptedEngine)
        thread = llm._scheduler._worker._thread
    """)
    support = str(pytestconfig.rootpath / "tests/support")
    assert run_code(program, support, timeout=TIMEOUT_S).stdout.split() == ["True"]


def test_a_forked_process_is_told_that_the_engine_stayed_behind(pytestconfig):
    program = textwrap.dedent("""
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[1])
        from genlm import AsyncLM, EngineClosedError
        from genlm.core.scheduler import worker
        from scripted import ScriptedEngine

        worker.EXIT_TIMEOUT_S = 3600.0  # the process that was forked does not wait
        llm = AsyncLM(ScriptedEngine, name="forked")
        llm.next_token_logprobs_sync([1])
        with llm._scheduler._worker._lock:  # as when the engine's thread is busy
            child = os.fork()
        if child:
            llm.next_token_logprobs_sync([2])
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for ask in (
            lambda: llm.next_token_logprobs_sync([3]),
            lambda: asyncio.run(llm.next_token_logprobs([3])),
        ):
            try:
                ask()
            except EngineClosedError as error:
                print(str(error).startswith("this process was forked"))
        llm.close()
        with AsyncLM(ScriptedEngine, name="loaded-here") as own:
            print(len(own.next_token_logprobs_sync([3])) == len(own.byte_vocab))
    """)
    done = run_program(
        *(sys.executable, "-W", "ignore::DeprecationWarning"),  # Python 3.12's, of the fork
        *("-c", program, pytestconfig.rootpath / "tests/support"),
        timeout=TIMEOUT_S,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["True"] * 3


def test_no_lock_that_was_held_at_a_fork_stops_the_forked_process(pytestconfig):
    program = textwrap.dedent("""
        import asyncio, contextlib, os, sys, warnings
        sys.path.insert(0, sys.argv[1])
        import genlm
        from scripted import ScriptedEngine

        warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # Python >= 3.12
        llm = genlm.AsyncLM(ScriptedEngine)
        llm.next_token_logprobs_sync([1])
        front = genlm.AsyncTokenCharacterTrie(genlm.TokenCharacterTrie(["a", "ab"]))
        asyncio.run(front.weight_sum([1, 2]))
        owners = (llm._scheduler._worker, llm.output_cache, llm._requests.counters, front)
        with contextlib.ExitStack() as held:  # as by other threads
            for owner in owners:
                held.enter_context(owner._lock)
            child = os.fork()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            llm.next_token_logprobs_sync([1])
        except genlm.EngineClosedError:
            print(llm.statistics().requests)
        print(len(asyncio.run(front.weight_sum([1, 2]))))
        print(llm)
    """)
    support = str(pytestconfig.rootpath / "tests/support")
    done = run_code(program, support, timeout=TIMEOUT_S)
    assert done.stderr == ""
    requests, nodes, text = done.stdout.splitlines()
    assert (requests, nodes) == ("2", "5")
    assert text.endswith("; closed>")


def test_a_model_may_be_dropped_by_a_thread_that_holds_its_lock():
    llm = AsyncLM(ScriptedEngine, name="dropped-inside")
    worker = llm._scheduler._worker
    thread = next(t for t in threading.enumerate() if t.name == "genlm-dropped-inside")
    with worker._lock:  # as when garbage is collected in the middle of the worker's work
        del llm
        gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("method", ["next_token_logprobs", "batch_next_token_logprobs"])
def test_a_request_that_is_garbage_waits_for_no_lock(start, monkeypatch, method):
    llm, _ = start()

    async def begin():
        coroutine = getattr(llm, method)([1] if method == "next_token_logprobs" else [[1], [2]])
        coroutine.send(None)
        return coroutine

    coroutine = asyncio.run(begin())
    # The thread that collects it may be one that holds the lock.
    monkeypatch.setattr(Worker, "leave", lambda *_: pytest.fail("it took the worker's lock"))
    coroutine.close()


def test_an_engine_whose_building_was_interrupted_is_closed_once_it_is_built(monkeypatch):
    engine, going_on = ScriptedEngine(), threading.Event()

    def build():
        assert going_on.wait(TIMEOUT_S)
        return engine

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "wait_until_built", interrupted)
    with pytest.raises(KeyboardInterrupt):
        AsyncLM(build, name="interrupted")
    thread = next(t for t in threading.enumerate() if t.name == "genlm-interrupted")
    going_on.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert engine.closed
