"""Concurrent calls share batches; failures, cancellation and ends stay with their own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import genlm
from genlm import AsyncTokenCharacterTrie, EngineClosedError, Token, TokenCharacterTrie
from genlm.testing.probes import StepGate

TIMEOUT_S = 120.0
VOCAB = [Token(0, b"a"), Token(1, b"ab"), Token(2, b"b")]
OPERATIONS = ["sum", "max", "logsumexp"]


class HeldTrie(TokenCharacterTrie, StepGate):
    """Records its batches; its reductions can be held."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        StepGate.__init__(self, TIMEOUT_S)
        self.batches: list[tuple[str, int]] = []

    def reduce(self, ws, operation, *, batch, returns):
        self.batches.append((operation, len(ws) if batch else 1))
        self.enter()
        if any(np.isnan(np.asarray(ws)).ravel()):
            raise ArithmeticError("nan")
        return super().reduce(ws, operation, batch=batch, returns=returns)


async def entered(trie: HeldTrie) -> None:
    await asyncio.to_thread(trie.wait_until_entered)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("returns", ["numpy", "torch"])
def test_concurrent_calls_share_batches_and_get_their_own_rows(operation, returns) -> None:
    trie = HeldTrie()
    rows = np.random.default_rng(0).random((100, 3))

    async def ask() -> list:
        async with AsyncTokenCharacterTrie(trie) as front:
            call = getattr(front, f"weight_{operation}")
            return await asyncio.gather(*(call(row, returns=returns) for row in rows))

    answers = asyncio.run(ask())
    assert trie.batches == [(operation, 64), (operation, 36)]
    expected = getattr(TokenCharacterTrie(VOCAB), f"batch_weight_{operation}")(rows)
    for answer, row in zip(answers, expected, strict=True):
        assert isinstance(answer, torch.Tensor if returns == "torch" else np.ndarray)
        np.testing.assert_array_equal(np.asarray(answer), row)
        owned = answer.untyped_storage().nbytes() if returns == "torch" else answer.base
        assert owned in (None, answer.nbytes)


def test_operations_and_dtypes_in_one_step_do_not_mix() -> None:
    trie = HeldTrie()

    async def ask() -> list:
        async with AsyncTokenCharacterTrie(trie) as front:
            return await asyncio.gather(
                front.weight_sum(np.ones(3)),
                front.weight_max(np.ones(3)),
                front.weight_sum(np.ones(3, np.float32)),
                front.weight_sum(torch.ones(3)),
                front.weight_sum([1.0, 1.0, 1.0]),
            )

    answers = asyncio.run(ask())
    assert [answer[-1] for answer in answers] == [3, 1, 3, 3, 3]
    assert [a.dtype.itemsize for a in answers] == [8, 8, 4, 4, 8]


def test_one_bad_request_fails_alone() -> None:
    trie = HeldTrie()

    async def ask() -> list:
        async with AsyncTokenCharacterTrie(trie) as front:
            return await asyncio.gather(
                front.weight_sum(np.ones(3)),
                front.weight_sum(np.ones(2)),
                front.weight_sum(np.full(3, np.nan)),
                front.weight_sum(np.ones(3)),
                return_exceptions=True,
            )

    good, short, poisoned, also_good = asyncio.run(ask())
    assert good[-1] == also_good[-1] == 3
    assert isinstance(short, genlm.WeightsError)
    assert isinstance(poisoned, genlm.EvaluationError)
    assert isinstance(poisoned.__cause__, ArithmeticError)


def test_a_cancelled_call_disturbs_no_other() -> None:
    trie = HeldTrie()

    async def ask() -> np.ndarray:
        async with AsyncTokenCharacterTrie(trie) as front:
            trie.hold()
            first = asyncio.create_task(front.weight_sum(np.ones(3)))
            await entered(trie)
            leaves = asyncio.create_task(front.weight_sum(np.ones(3)))
            stays = asyncio.create_task(front.weight_sum(np.full(3, 2.0)))
            await asyncio.sleep(0)
            leaves.cancel()
            first.cancel()
            await asyncio.gather(first, leaves, return_exceptions=True)
            assert first.cancelled()
            assert leaves.cancelled()
            trie.release()  # only now: else the next batch may leave before `leaves` does
            return await stays

    assert asyncio.run(ask())[-1] == 6
    assert trie.batches == [("sum", 1), ("sum", 1)]


def test_the_event_loop_runs_while_the_trie_works() -> None:
    trie = HeldTrie()

    async def ask() -> float:
        async with AsyncTokenCharacterTrie(trie) as front:
            trie.hold()
            call = asyncio.create_task(front.weight_sum(np.ones(3)))
            await entered(trie)
            trie.release()  # runs only because the loop is free
            return (await call)[-1]

    assert asyncio.run(ask()) == 3


@pytest.mark.parametrize("end", ["cleanup", "shutdown"])
def test_ending_fails_who_waits_and_a_later_call_starts_afresh(end) -> None:
    trie = HeldTrie()

    async def ask() -> float:
        front = AsyncTokenCharacterTrie(trie)
        front.start()
        trie.hold()
        call = asyncio.create_task(front.weight_sum(np.ones(3)))
        await entered(trie)
        ending = asyncio.create_task(
            front.cleanup() if end == "cleanup" else asyncio.to_thread(front.shutdown)
        )
        with pytest.raises(EngineClosedError):
            await call
        trie.release()
        await ending
        await front.cleanup()
        again = await front.weight_sum(np.ones(3))
        await front.cleanup()
        return again[-1]

    assert asyncio.run(ask()) == 3


def test_one_front_serves_several_event_loops_one_after_the_other() -> None:
    front = AsyncTokenCharacterTrie(TokenCharacterTrie(VOCAB))
    for _ in range(2):
        assert asyncio.run(front.weight_max(np.arange(3.0)))[-1] == 2
    front.shutdown()


@pytest.mark.parametrize("backend", [None, "numpy", "sequential"])
def test_from_vocab_builds_the_backend_asked_for(backend, monkeypatch) -> None:
    monkeypatch.delenv("GENLM_TRIE", raising=False)
    if backend is None:
        monkeypatch.setenv("GENLM_TRIE", "numpy")
    front = AsyncTokenCharacterTrie.from_vocab(VOCAB, backend=backend)
    assert isinstance(front.trie, TokenCharacterTrie)
    front.shutdown()


def test_from_vocab_names_an_unknown_backend() -> None:
    with pytest.raises(genlm.UnknownBackendError, match="no trie named 'sequentiel'"):
        AsyncTokenCharacterTrie.from_vocab(VOCAB, backend="sequentiel")


def test_a_vocabulary_in_place_of_a_trie_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a trie; found list\. .*from_vocab takes a"):
        AsyncTokenCharacterTrie(VOCAB)
