"""The functions of `Python` in an event loop: on another thread, one call after the other."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from constrained_model import SmallEngine
from scripted import TIMEOUT_S

import genlm
from genlm.constraints import Python
from genlm.constraints.rejection import Search
from genlm.core.base.blocking import off_loop, run_blocking

PROMPT, SIZE = (2,), 6


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


class Held:
    """A function whose first call waits until the event loop has `entered` it and frees it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.free = threading.Event()
        self.texts: list[bytes] = []

    def __call__(self, text: bytes) -> bool:
        self.texts.append(text)
        self.loop.call_soon_threadsafe(self.entered.set)
        assert self.free.wait(TIMEOUT_S), "the event loop was blocked"
        return not text.startswith(b"a")


def test_the_event_loop_runs_while_a_function_is_called(llm):
    async def program() -> None:
        function = Held()
        constraint = Python(function).start(llm, SIZE)
        population = llm.population(PROMPT, SIZE)
        drawing = asyncio.create_task(constraint.draw(population, seed=4))
        await function.entered.wait()
        function.free.set()
        drawn = await drawing
        expected = run_blocking(constraint.draw(population, seed=4))
        for one, other in zip(drawn, expected, strict=True):
            assert torch.equal(one, other)
        assert len(function.texts) == len(set(function.texts))
        advanced = constraint.advance(drawn.token_ids)
        assert len(function.texts) == len(set(function.texts)), "nothing was tested again"
        assert (advanced.log_potential == 0).all()

    asyncio.run(program())


@pytest.mark.parametrize("error", [LookupError("of the function"), StopIteration()])
def test_the_error_of_a_function_is_the_callers(llm, error):
    async def program() -> None:
        errors, texts = [error], []

        def function(text: bytes) -> bool:
            texts.append(text)
            if errors:
                raise errors.pop()
            return True

        constraint = Python(function).start(llm, SIZE)
        population = llm.population(PROMPT, SIZE)
        expected = RuntimeError if isinstance(error, StopIteration) else type(error)
        with pytest.raises(expected) as raised:
            await asyncio.wait_for(constraint.draw(population, seed=4), TIMEOUT_S)
        assert error in {raised.value, raised.value.__cause__}
        assert error.__notes__ == [f"{function!r} was called with {texts[0]!r}"]
        drawn = await constraint.draw(population, seed=4)
        assert (drawn.token_ids >= 0).all()

    asyncio.run(program())


def test_a_cancelled_draw_ends_after_the_present_call_and_keeps_nothing(llm):
    searches: weakref.WeakSet[Search] = weakref.WeakSet()

    @contextmanager
    def recorded() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            first = Search.__init__
            patch.setattr(
                Search,
                "__init__",
                lambda search, *arguments: (searches.add(search), first(search, *arguments))[1],
            )
            yield

    async def program() -> None:
        function = Held()
        language = Python(function)
        constraint = language.start(llm, SIZE)
        population = llm.population(PROMPT, SIZE)
        with recorded():
            drawing = asyncio.create_task(constraint.draw(population, seed=4))
            await function.entered.wait()
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        function.free.set()
        await asyncio.wrap_future(language._thread.submit(int))  # waits for the search
        assert len(function.texts) <= 3, "the first draws of the first member"
        assert len(function.texts) < len(all_texts)
        del drawing
        gc.collect()
        assert not searches
        assert constraint.next_constraint is None
        drawn = run_blocking(constraint.draw(population, seed=4))
        assert torch.equal(drawn.token_ids, expected.token_ids)

    all_texts: list[bytes] = []
    language = Python(lambda text: all_texts.append(text) or not text.startswith(b"a"))
    expected = run_blocking(
        language.start(llm, SIZE).draw(llm.population(PROMPT, SIZE), seed=4)
    )
    asyncio.run(program())


def test_functions_of_a_language_are_not_called_at_the_same_time(llm):
    """By two populations, whose first calls would meet."""
    meeting = threading.Barrier(2)
    met: list[bytes] = []

    def function(text: bytes) -> bool:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
            met.append(text)
        return True

    async def program() -> None:
        language = Python(function)
        populations = [llm.population(PROMPT, SIZE) for _ in range(2)]
        draws = [
            language.start(llm, SIZE).draw(population, seed=4) for population in populations
        ]
        await asyncio.gather(*draws)

    asyncio.run(program())
    assert meeting.broken
    assert not met


def test_a_call_off_the_loop_may_raise_stop_iteration():
    async def program() -> None:
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await asyncio.wait_for(off_loop(next, iter([])), TIMEOUT_S)

    asyncio.run(program())
