"""Draws and sums of log-weight rows, against float64 and against frequencies."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref

import numpy as np
import pytest
import torch

import genlm
from genlm.backend import draw
from genlm.backend.draw import (
    DRAW_METHODS,
    draw_from,
    logp_at,
    logsumexp_from,
    set_draw_method,
)
from genlm.backend.llm import MockAsyncLM, temper

INF = float("inf")


@pytest.fixture(autouse=True)
def default_method():
    yield
    set_draw_method("gumbel_max")


def gathered(*calls, **options):
    """What concurrent calls return, on a loop of their own."""

    async def main():
        async with asyncio.timeout(60):  # a call that is never answered fails the test
            return await asyncio.gather(*(call() for call in calls), **options)

    return asyncio.run(main())


def rows(count, vocab=5, seed=0, dtype=torch.float32):
    """Log-weights over a wide range, not normalised."""
    return (
        torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype) * 3
    )


def log_sum(row):
    """The oracle: the log of a sum, in float64."""
    weights = np.asarray(row, dtype=np.float64)
    top = weights.max()
    return top + math.log(np.exp(weights - top).sum()) if top > -INF else -INF


def spied():
    """Have the method of drawing note the shapes of what it is given."""
    shapes = []

    def picker(logps):
        shapes.append(tuple(logps.shape))
        return draw.gumbel_max(logps)

    set_draw_method(picker)
    return shapes


# -- answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [lambda row: row, lambda row: row.double().numpy(), lambda row: row.tolist()]
)
def test_a_draw_is_weighed_exactly(dtype, kind):
    for row in rows(6, dtype=dtype):
        expected = log_sum(row.double())
        index, logw, logp = gathered(lambda row=row: draw_from(kind(row)))[0]
        assert isinstance(index, int)
        assert logw == pytest.approx(expected, abs=1e-12)
        assert logp == pytest.approx(row[index].item() - expected, abs=1e-12)


def test_a_draw_from_a_proposal_is_weighed_under_its_target():
    proposals, targets = rows(6, seed=1), rows(6, seed=2)
    calls = [
        lambda p=p, t=t: draw_from(p, target=t)
        for p, t in zip(proposals, [*targets[:3], *targets[3:].numpy()], strict=True)
    ]
    found = gathered(*calls, lambda: draw_from(proposals[0]))
    for (index, logw, logp), proposal, target in zip(found, proposals, targets, strict=False):
        assert logp == pytest.approx(proposal[index].item() - log_sum(proposal), abs=1e-12)
        assert logw == pytest.approx(target[index].item() - logp, abs=1e-12)
    assert found[-1][1] == pytest.approx(log_sum(proposals[0]), abs=1e-12)


def test_weighted_draws_estimate_the_sum_of_the_target():
    torch.manual_seed(3)
    proposal, target = rows(2, seed=4)
    drawn = gathered(*[lambda: draw_from(proposal, target)] * 4000)
    estimates = np.exp([logw for _, logw, _ in drawn])
    error = estimates.std() / math.sqrt(len(estimates))
    assert abs(estimates.mean() - math.exp(log_sum(target))) < 4 * error
    assert error < 0.2 * math.exp(log_sum(target))


@pytest.mark.parametrize("method", DRAW_METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indices_are_drawn_with_their_probabilities(method, dtype):
    torch.manual_seed(5)
    row = torch.tensor([-INF, 0.3, 2.0, -1.0, -INF, -4.5, 1.2, -INF]).to(dtype)
    n = 20_000
    drawn = DRAW_METHODS[method](row.repeat(n, 1))
    counts = np.bincount(drawn.numpy(), minlength=len(row))
    expected = n * row.double().softmax(-1).numpy()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 23.5  # the 0.9999 quantile at 4 degrees of freedom


@pytest.mark.parametrize("method", DRAW_METHODS)
def test_methods_take_one_row_or_many(method):
    torch.manual_seed(6)
    only = torch.tensor([-INF, -INF, -3.0, -INF])
    pick = DRAW_METHODS[method]
    assert pick(only).shape == ()
    assert pick(only).item() == 2
    assert pick(only.repeat(3, 1)).tolist() == [2, 2, 2]
    assert 0 <= pick(torch.full((4,), -INF)).item() < 4


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("method", ["gumbel_max", "inverse_cdf"])
def test_the_extreme_uniform_numbers_draw_what_is_possible(monkeypatch, method, uniform):
    monkeypatch.setattr(
        torch, "rand", lambda *size, **options: torch.full(*size, uniform, **options)
    )
    row = torch.tensor([-INF, -1000.0, -1000.5, -1001.0, -INF])
    assert DRAW_METHODS[method](row).item() in {1, 2, 3}
    single = torch.full((5,), -INF)
    single[3] = 0.0
    assert DRAW_METHODS[method](single).item() == 3


@pytest.mark.parametrize("method", DRAW_METHODS)
def test_a_row_without_support_draws_with_weight_zero_and_disturbs_nobody(method):
    set_draw_method(method)
    empty, other = torch.full((5,), -INF), rows(1)[0]
    found = gathered(
        lambda: draw_from(empty), lambda: draw_from(other), lambda: draw_from(empty, other)
    )
    for index, logw, logp in (found[0], found[2]):
        assert 0 <= index < 5
        assert logw == logp == -INF
    assert found[1][1] == pytest.approx(log_sum(other), abs=1e-12)


def test_sums_and_entries_are_exact_and_keep_the_precision_of_the_row():
    table = rows(5, dtype=torch.float64) - 700
    table[3] = -INF
    sums = gathered(*[lambda row=row: logsumexp_from(row) for row in table])
    assert sums == pytest.approx([log_sum(row) for row in table], abs=1e-11)
    assert sums[3] == -INF
    entries = gathered(*[lambda row=row, i=i: logp_at(row, i) for i, row in enumerate(table)])
    assert entries == [table[i, i].item() for i in range(5)]
    assert gathered(lambda: logp_at(table[0].numpy(), -1)) == [table[0, -1].item()]


def test_rows_are_not_changed():
    row, target = rows(2)
    before = row.clone(), target.clone()
    gathered(lambda: draw_from(row, target), lambda: logsumexp_from(row))
    assert torch.equal(row, before[0])
    assert torch.equal(target, before[1])


# -- wrong rows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: draw_from(torch.zeros(2, 5)),
        lambda: draw_from(torch.tensor(0.0)),
        lambda: draw_from([]),
        lambda: draw_from(["a"]),
        lambda: draw_from(torch.zeros(5, dtype=torch.complex64)),
        lambda: draw_from(torch.tensor([0.0, math.nan, 0, 0, 0])),
        lambda: draw_from(torch.tensor([0.0, INF, 0, 0, 0])),
        lambda: draw_from(torch.zeros(5), target=torch.zeros(4)),
        lambda: logsumexp_from(torch.tensor([0.0, math.nan, 0, 0, 0])),
        lambda: logp_at(torch.zeros(2, 5), 0),
    ],
)
@pytest.mark.parametrize("method", DRAW_METHODS)
def test_a_wrong_row_fails_its_own_caller_alone(wrong, method):
    set_draw_method(method)
    row = rows(1)[0]
    found = gathered(
        lambda: draw_from(row),
        wrong,
        lambda: logsumexp_from(row),
        lambda: draw_from(row),
        return_exceptions=True,
    )
    assert isinstance(found[1], ValueError)
    for _, logw, _ in (found[0], found[3]):
        assert logw == pytest.approx(log_sum(row), abs=1e-12)
    assert found[2] == pytest.approx(log_sum(row), abs=1e-12)


def test_an_entry_that_is_not_there_is_an_error():
    for index in (5, -6):
        with pytest.raises(IndexError, match="of a row of 5"):
            gathered(lambda index=index: logp_at(torch.zeros(5), index))
    with pytest.raises(TypeError):
        gathered(lambda: logp_at(torch.zeros(5), 1.5))


# -- the choice of the method -------------------------------------------------------------


def test_a_method_of_ones_own_draws():
    set_draw_method(lambda logps: logps.argmin(-1))
    row = rows(1)[0]
    index, _, logp = gathered(lambda: draw_from(row))[0]
    assert index == int(row.argmin())
    assert logp == pytest.approx(row.min().item() - log_sum(row), abs=1e-12)


def test_an_unknown_method_is_refused_and_changes_nothing():
    with pytest.raises(
        ValueError, match="expected one of gumbel_max, multinomial, inverse_cdf"
    ):
        set_draw_method("gumbel")
    with pytest.raises(TypeError, match="callable"):
        set_draw_method(3)
    assert len(gathered(lambda: draw_from(rows(1)[0]))) == 1


@pytest.mark.parametrize("bad", [lambda logps: 1 / 0, lambda logps: logps, next])
def test_a_method_that_fails_ends_every_draw_and_no_sum(bad):
    set_draw_method(bad)
    row = rows(1)[0]
    found = gathered(
        *[lambda: draw_from(row)] * 2, lambda: logsumexp_from(row), return_exceptions=True
    )
    assert [type(each) for each in found[:2]] == [genlm.EvaluationError] * 2
    assert found[0].__cause__ is not None
    assert found[2] == pytest.approx(log_sum(row), abs=1e-12)


# -- concurrent calls ---------------------------------------------------------------------


def test_calls_at_several_depths_are_drawn_together():
    shapes = spied()

    async def nested(row, depth):
        if depth:
            return (await asyncio.gather(nested(row, depth - 1)))[0]
        return await draw_from(row)

    table = rows(9)
    gathered(*[lambda i=i: nested(table[i], i % 3) for i in range(9)])
    assert shapes == [(9, 5)]


def test_rows_of_several_lengths_and_kinds_are_drawn_together_by_length():
    shapes = spied()
    long, short = rows(4), rows(3, vocab=3).numpy().astype(np.float64)
    gathered(
        *[lambda row=row: draw_from(row) for row in long],
        *[lambda row=row: draw_from(row) for row in short],
        lambda: logsumexp_from(long[0]),
        lambda: logp_at(short[0], 1),
    )
    assert shapes == [(4, 5), (3, 3)]


def test_very_many_rows_are_drawn_in_parts(monkeypatch):
    shapes = spied()
    monkeypatch.setattr(draw, "MAX_VALUES", 12)
    table = rows(5)
    found = gathered(*[lambda row=row: draw_from(row) for row in table])
    assert shapes == [(2, 5), (2, 5), (1, 5)]
    for (_, logw, _), row in zip(found, table, strict=True):
        assert logw == pytest.approx(log_sum(row), abs=1e-12)


@pytest.mark.parametrize("method", ["gumbel_max", "inverse_cdf"])
def test_a_seed_fixes_the_draws_whatever_is_asked_beside_them(method):
    set_draw_method(method)
    table = rows(8, vocab=50)
    draws = [lambda row=row: draw_from(row) for row in table]
    others = [lambda: logsumexp_from(table[0]), lambda: logp_at(table[0], 2)]

    def seeded(*calls):
        torch.manual_seed(7)
        return gathered(*calls)

    together = seeded(*draws)
    assert len({index for index, _, _ in together}) > 1
    assert seeded(*draws) == together
    mixed = seeded(*draws[:3], *others, *draws[3:])
    assert [each for each in mixed if isinstance(each, tuple)] == together
    torch.manual_seed(7)
    assert [gathered(one)[0] for one in draws] == together
    torch.manual_seed(8)
    assert gathered(*draws) != together


def test_a_cancelled_call_disturbs_no_other():
    table = rows(3, vocab=50)
    torch.manual_seed(9)
    expected = gathered(lambda: draw_from(table[1]), lambda: draw_from(table[2]))

    async def main():
        tasks = [asyncio.ensure_future(draw_from(row)) for row in table]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    torch.manual_seed(9)
    found = asyncio.run(main())
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == expected


def test_a_loop_that_closes_with_calls_under_way_leaves_the_next_alone():
    row = rows(1)[0]
    loop = asyncio.new_event_loop()
    task = loop.create_task(draw_from(row))
    loop.call_soon(loop.stop)
    loop.run_forever()
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    assert len(gathered(lambda: draw_from(row))) == 1


def test_an_event_loop_that_was_closed_during_a_call_is_freed():
    row = rows(1)[0]
    loop = asyncio.new_event_loop()
    task = loop.create_task(draw_from(row))
    task._log_destroy_pending = False
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    closed = weakref.ref(loop)
    del loop, task
    gathered(lambda: draw_from(row))
    gc.collect()
    assert closed() is None


def test_event_loops_of_several_threads_draw_at_once():
    table = rows(40)
    found = {}

    def work(name):
        calls = [lambda row=row: logsumexp_from(row) for row in table[name::4]]
        found[name] = [gathered(*calls) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in range(4):
        expected = [log_sum(row) for row in table[name::4]]
        for sums in found[name]:
            assert sums == pytest.approx(expected, abs=1e-12)


# -- temperature, and programs ------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.1, 0.7, 2, 50.0, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_tempered_as_in_float64(temperature, dtype):
    row = rows(1)[0].to(dtype).log_softmax(-1)
    row[1] = -INF
    before = row.clone()
    found = temper(row, temperature)
    assert found.dtype == dtype
    assert torch.equal(row, before)
    weights = row.double().numpy()
    with np.errstate(over="ignore"):
        logits = (weights - weights.max()) / temperature
    expected = torch.from_numpy(logits - log_sum(logits)).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_tables_and_impossible_rows_are_tempered_too():
    table = torch.stack([rows(1)[0].log_softmax(-1), torch.full((5,), -INF)])
    found = temper(table, 0.5)
    torch.testing.assert_close(found[0], temper(table[0], 0.5))
    assert torch.equal(found[1], table[1])


def test_temperature_1_is_the_row_itself():
    row = rows(1)[0]
    assert temper(row, 1) is row
    assert temper(row, 1.0) is row


@pytest.mark.parametrize("temperature", [0, -1.0, INF, math.nan])
def test_an_impossible_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match="finite number above 0"):
        temper(rows(1)[0], temperature)


def test_a_program_draws_below_a_mask_in_two_stages(tokenizer):
    """First whether the token is in the mask, then which: its probability is the model's."""
    llm = MockAsyncLM(tokenizer)
    mask = torch.zeros(len(llm.byte_vocab), dtype=torch.bool, device=llm.device)
    mask[40:90] = True

    async def particle(context):
        row = temper(await llm.next_token_logprobs(context), 0.7)
        inside = row.masked_fill(~mask, -INF)
        mass = await logsumexp_from(inside)
        token, logw, logp = await draw_from(inside)
        assert await logp_at(row, token) == pytest.approx(logp + mass, abs=1e-6)
        return context[0], token, logw

    for first, token, logw in gathered(*[lambda n=n: particle([n]) for n in range(3, 20)]):
        row = llm.next_token_logprobs_sync([first]).double() / 0.7
        assert mask[token]
        assert logw == pytest.approx(log_sum(row[mask]) - log_sum(row), abs=1e-5)
