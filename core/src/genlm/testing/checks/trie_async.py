"""Checks of `AsyncTokenCharacterTrie`: concurrent callers of one trie."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from genlm import AsyncTokenCharacterTrie, EngineClosedError, WeightsError
from genlm.testing.check import expect, trie_check
from genlm.testing.fixture import on_thread
from genlm.testing.probes import TrieProbe
from genlm.testing.strategies import tokens
from genlm.testing.trie_fixture import TrieFixture

OPERATIONS = ("sum", "max", "logsumexp")
WORDS = tokens(b"", b"a", b"ab", b"abc", b"b", b"b", b"\xff")


class _Scene:
    """An async trie, the probe that it uses, and rows of weights."""

    def __init__(self, fixture: TrieFixture) -> None:
        self.fixture = fixture
        self.probe = TrieProbe(fixture.build(WORDS), fixture.timeout_s)
        probe: Any = self.probe  # behaves as the trie that it wraps
        self.trie = AsyncTokenCharacterTrie(probe)
        self.rows = [fixture.weights(len(WORDS), salt=salt) for salt in range(6)]
        fixture.at_end(self.trie.shutdown)
        fixture.at_end(self.probe.release)

    def ask(self, ws: Any, operation: str = "sum", **options: Any) -> asyncio.Task[Any]:
        """Start a call."""
        return asyncio.ensure_future(getattr(self.trie, f"weight_{operation}")(ws, **options))

    async def ask_held(self, ws: Any) -> asyncio.Task[Any]:
        """Start a call that waits in the trie until the probe is released."""
        self.probe.hold()
        task = self.ask(ws)
        await on_thread(self.probe.wait_until_entered, len(self.probe.reductions) + 1)
        return task

    def check(self, values: Any, ws: Any, operation: str = "sum", **example: Any) -> None:
        """Raise `CheckFailure` unless these are the values of a row."""
        expect(not isinstance(values, BaseException), "values", repr(values), **example)
        self.fixture.check_values(self.probe, values, ws, operation, **example)


@trie_check(cases=(*OPERATIONS, "tensors", "float64", "another event loop"))
def concurrent_reductions_equal_lone_ones(fixture: TrieFixture) -> None:
    """Each of many concurrent calls gets the values of its weights, in their type."""
    scene = _Scene(fixture)

    async def everything() -> None:
        calls: list[tuple[str, str, torch.Tensor, asyncio.Task[Any]]] = []
        for row in scene.rows:
            for operation in OPERATIONS:
                calls.append((operation, operation, row, scene.ask(row, operation)))
                double = row.double()
                calls.append(("float64", operation, double, scene.ask(double, operation)))
                tensors = scene.ask(row, operation, returns="torch")
                calls.append(("tensors", operation, row, tensors))
        for case, operation, row, call in calls:
            values = await call
            kind = str(values.dtype).removeprefix("torch.")
            wanted = "float64" if case == "float64" else "float32"
            expect(kind == wanted, f"{wanted} of {row.dtype}", kind, case=case)
            is_tensor = isinstance(values, torch.Tensor)
            expect(
                is_tensor == (case == "tensors"), f"the kind asked for: {case}", type(values)
            )
            scene.check(values, row, operation, case=case)
            fixture.saw(case)

    fixture.run(everything())
    fixture.new_loop().run(everything(), fixture.timeout_s)
    fixture.saw("another event loop")


@trie_check(cases=("one batch",))
def concurrent_reductions_share_a_batch(fixture: TrieFixture) -> None:
    """Calls that arrive while the trie works reach it together, one batch per operation."""
    scene = _Scene(fixture)

    async def while_it_works() -> None:
        first = await scene.ask_held(scene.rows[0])
        calls = [scene.ask(row, operation) for operation in OPERATIONS for row in scene.rows]
        await asyncio.sleep(0)
        scene.probe.release()
        for values, row in zip(await asyncio.gather(*calls), 3 * scene.rows):
            expect(
                len(values) == len(scene.probe), f"{len(scene.probe)} values", values, row=row
            )
        scene.check(await first, scene.rows[0])

    fixture.run(while_it_works())
    wanted = sorted((f"batch_weight_{operation}", len(scene.rows)) for operation in OPERATIONS)
    found = sorted(scene.probe.reductions[1:])
    expect(found == wanted, f"the batches {wanted}", found)
    fixture.saw("one batch")


@trie_check(cases=("alone", "among others"))
def a_failing_reduction_fails_alone(fixture: TrieFixture) -> None:
    """Invalid weights raise for their caller; concurrent calls are answered."""
    scene = _Scene(fixture)

    async def one_is_invalid() -> None:
        first = await scene.ask_held(scene.rows[0])
        before, wrong, after = (
            scene.ask(ws) for ws in (scene.rows[1], scene.rows[2][:-1], scene.rows[3])
        )
        await asyncio.sleep(0)
        scene.probe.release()
        found = await _outcomes(first, before, wrong, after)
        expect(isinstance(found[2], WeightsError), "WeightsError", repr(found[2]))
        for position in (0, 1, 3):
            scene.check(found[position], scene.rows[position], beside="wrong weights")
        fixture.saw("among others")
        (alone,) = await _outcomes(scene.ask(scene.rows[2][:-1]))
        expect(isinstance(alone, WeightsError), "WeightsError", repr(alone), calls=1)
        fixture.saw("alone")

    fixture.run(one_is_invalid())


@trie_check(cases=("in the trie", "waiting"))
def cancelled_reductions_change_no_other(fixture: TrieFixture) -> None:
    """A cancelled call ends at once; all others get their values, then and later."""
    scene = _Scene(fixture)

    async def some_are_cancelled() -> None:
        inside = await scene.ask_held(scene.rows[0])
        waiting, stays = scene.ask(scene.rows[1]), scene.ask(scene.rows[2])
        await asyncio.sleep(0)
        for case, call in (("in the trie", inside), ("waiting", waiting)):
            call.cancel()
            (found,) = await _outcomes(call)
            cancelled = isinstance(found, asyncio.CancelledError)
            expect(cancelled, "CancelledError, while the trie works", repr(found), case=case)
            fixture.saw(case)
        scene.probe.release()
        (values,) = await _outcomes(stays)
        scene.check(values, scene.rows[2], after="others were cancelled")
        scene.check(await scene.ask(scene.rows[1]), scene.rows[1], asked="again")

    fixture.run(some_are_cancelled())


@trie_check(cases=("shutdown", "cleanup"))
def shutdown_ends_every_reduction(fixture: TrieFixture) -> None:
    """`shutdown` and `cleanup` end calls with `EngineClosedError`; later calls work."""

    async def ended(case: str) -> None:
        scene = _Scene(fixture)
        calls = [await scene.ask_held(scene.rows[0]), *map(scene.ask, scene.rows[1:3])]
        await asyncio.sleep(0)
        if case == "shutdown":
            ending = on_thread(scene.trie.shutdown)
        else:
            ending = asyncio.ensure_future(scene.trie.cleanup())
        found = await _outcomes(*calls)
        closed = [isinstance(each, EngineClosedError) for each in found]
        expect(all(closed), "EngineClosedError for each of 3 calls", found, by=case)
        scene.probe.release()
        await ending
        scene.check(await scene.ask(scene.rows[3]), scene.rows[3], after=case)
        await scene.trie.cleanup()
        await scene.trie.cleanup()
        fixture.saw(case)

    for case in ("shutdown", "cleanup"):
        fixture.run(ended(case))


async def _outcomes(*calls: asyncio.Task[Any]) -> list[Any]:
    """The values or the exception of each call."""
    return await asyncio.gather(*calls, return_exceptions=True)
