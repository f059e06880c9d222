"""Checks of `AsyncTokenCharacterTrie` in front of a trie: many callers, one thread."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from genlm import AsyncTokenCharacterTrie, EngineClosedError, WeightsError
from genlm.testing.background import on_thread
from genlm.testing.check import trie_check
from genlm.testing.failure import expect
from genlm.testing.trie_probe import TrieProbe
from genlm.testing.trie_trial import TrieTrial
from genlm.testing.vocabularies import tokens

OPERATIONS = ("sum", "max", "logsumexp")
WORDS = tokens(b"", b"a", b"ab", b"abc", b"b", b"b", b"\xff")


class _Stage:
    """A front, the probe behind it, and rows of weights to ask about."""

    def __init__(self, trial: TrieTrial) -> None:
        self.trial = trial
        self.probe = TrieProbe(trial.build(WORDS), trial.patience_s)
        probe: Any = self.probe  # behaves as the trie that it wraps
        self.front = AsyncTokenCharacterTrie(probe)
        self.rows = [trial.weights(len(WORDS), salt=salt) for salt in range(6)]
        trial.at_end(self.front.shutdown)
        trial.at_end(self.probe.release)

    def ask(self, ws: Any, operation: str = "sum", **options: Any) -> asyncio.Task[Any]:
        """Start a call."""
        return asyncio.ensure_future(getattr(self.front, f"weight_{operation}")(ws, **options))

    async def ask_held(self, ws: Any) -> asyncio.Task[Any]:
        """Start a call that stays in the trie until the probe is released."""
        self.probe.hold()
        task = self.ask(ws)
        await on_thread(self.probe.wait_until_entered, len(self.probe.reductions) + 1)
        return task

    def check(self, values: Any, ws: Any, operation: str = "sum", **example: Any) -> None:
        """Raise unless these are the values of a row."""
        expect(not isinstance(values, BaseException), "values", repr(values), **example)
        self.trial.check_values(self.probe, values, ws, operation, **example)


@trie_check(cases=(*OPERATIONS, "mass", "tensors", "float64", "another event loop"))
def concurrent_reductions_equal_lone_ones(trial: TrieTrial) -> None:
    """Each of many concurrent calls gets the values of its own weights, of its own kind."""
    stage = _Stage(trial)

    async def everything() -> None:
        calls: list[tuple[str, str, torch.Tensor, asyncio.Task[Any]]] = []
        for row in stage.rows:
            for operation in OPERATIONS:
                calls.append((operation, operation, row, stage.ask(row, operation)))
                double = row.double()
                calls.append(("float64", operation, double, stage.ask(double, operation)))
                tensors = stage.ask(row, operation, returns="torch")
                calls.append(("tensors", operation, row, tensors))
            mass = asyncio.ensure_future(stage.front.mass_sum(row))
            calls.append(("mass", "sum", row, mass))
        for case, operation, row, call in calls:
            values = await call
            kind = str(values.dtype).removeprefix("torch.")
            wanted = "float64" if case == "float64" else "float32"
            expect(kind == wanted, f"{wanted} of {row.dtype}", kind, case=case)
            is_tensor = isinstance(values, torch.Tensor)
            expect(
                is_tensor == (case == "tensors"), f"the kind asked for: {case}", type(values)
            )
            stage.check(values, row, operation, case=case)
            trial.saw(case)

    trial.run(everything())
    trial.new_loop().run(everything(), trial.patience_s)
    trial.saw("another event loop")


@trie_check(cases=("one batch",))
def concurrent_reductions_share_a_batch(trial: TrieTrial) -> None:
    """Calls that arrive while the trie works reach it together, one batch an operation."""
    stage = _Stage(trial)

    async def while_it_works() -> None:
        first = await stage.ask_held(stage.rows[0])
        calls = [stage.ask(row, operation) for operation in OPERATIONS for row in stage.rows]
        await asyncio.sleep(0)
        stage.probe.release()
        for values, row in zip(await asyncio.gather(*calls), 3 * stage.rows):
            expect(
                len(values) == len(stage.probe), f"{len(stage.probe)} values", values, row=row
            )
        stage.check(await first, stage.rows[0])

    trial.run(while_it_works())
    wanted = sorted((f"batch_weight_{operation}", len(stage.rows)) for operation in OPERATIONS)
    found = sorted(stage.probe.reductions[1:])
    expect(found == wanted, f"the batches {wanted}", found)
    trial.saw("one batch")


@trie_check(cases=("alone", "among others"))
def a_failing_reduction_fails_alone(trial: TrieTrial) -> None:
    """Wrong weights raise for who gave them; the calls beside them are answered."""
    stage = _Stage(trial)

    async def one_is_wrong() -> None:
        first = await stage.ask_held(stage.rows[0])
        before, wrong, after = (
            stage.ask(ws) for ws in (stage.rows[1], stage.rows[2][:-1], stage.rows[3])
        )
        await asyncio.sleep(0)
        stage.probe.release()
        found = await _outcomes(first, before, wrong, after)
        expect(isinstance(found[2], WeightsError), "WeightsError", repr(found[2]))
        for position in (0, 1, 3):
            stage.check(found[position], stage.rows[position], beside="wrong weights")
        trial.saw("among others")
        (alone,) = await _outcomes(stage.ask(stage.rows[2][:-1]))
        expect(isinstance(alone, WeightsError), "WeightsError", repr(alone), calls=1)
        trial.saw("alone")

    trial.run(one_is_wrong())


@trie_check(cases=("in the trie", "waiting"))
def cancelled_reductions_disturb_nobody(trial: TrieTrial) -> None:
    """A call that is cancelled ends at once; all others get their values, then and later."""
    stage = _Stage(trial)

    async def some_leave() -> None:
        inside = await stage.ask_held(stage.rows[0])
        waiting, stays = stage.ask(stage.rows[1]), stage.ask(stage.rows[2])
        await asyncio.sleep(0)
        for case, call in (("in the trie", inside), ("waiting", waiting)):
            call.cancel()
            (found,) = await _outcomes(call)
            cancelled = isinstance(found, asyncio.CancelledError)
            expect(cancelled, "CancelledError, while the trie works", repr(found), case=case)
            trial.saw(case)
        stage.probe.release()
        (values,) = await _outcomes(stays)
        stage.check(values, stage.rows[2], after="others were cancelled")
        stage.check(await stage.ask(stage.rows[1]), stage.rows[1], asked="again")

    trial.run(some_leave())


@trie_check(cases=("shutdown", "cleanup"))
def ending_a_front_ends_every_reduction(trial: TrieTrial) -> None:
    """`shutdown` and `cleanup` end calls with `EngineClosedError`; later ones start anew."""

    async def ended(case: str) -> None:
        stage = _Stage(trial)
        calls = [await stage.ask_held(stage.rows[0]), *map(stage.ask, stage.rows[1:3])]
        await asyncio.sleep(0)
        if case == "shutdown":
            ending = on_thread(stage.front.shutdown)
        else:
            ending = asyncio.ensure_future(stage.front.cleanup())
        found = await _outcomes(*calls)
        closed = [isinstance(each, EngineClosedError) for each in found]
        expect(all(closed), "EngineClosedError for each of 3 calls", found, by=case)
        stage.probe.release()
        await ending
        stage.check(await stage.ask(stage.rows[3]), stage.rows[3], after=case)
        await stage.front.cleanup()
        await stage.front.cleanup()
        trial.saw(case)

    for case in ("shutdown", "cleanup"):
        trial.run(ended(case))


async def _outcomes(*calls: asyncio.Task[Any]) -> list[Any]:
    """The values or the exception of each call."""
    return await asyncio.gather(*calls, return_exceptions=True)
