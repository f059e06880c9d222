"""Rows are correct while sequences are shared, evicted and cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from genlm import AsyncLM, EvaluationError, ModelLoadError, OutputCache
from genlm.plugin import Query, TokenSequence
from genlm_llamacpp.batch import Extensions, build_batch
from genlm_llamacpp.context import LlamaContext
from genlm_llamacpp.division import choose_parts

from .conftest import check_memory, rows_of

SETTINGS = {
    "few sequences": ("llama", {"n_seq_max": 8}),
    "few cells": ("llama", {"n_ctx": 256}),
    "divided cache": ("llama", {"n_seq_max": 8, "kv_unified": False}),
    "windows": ("gemma2", {"n_ctx": 256, "n_batch": 16, "n_ubatch": 8}),
    "recurrent": ("mamba", {"n_seq_max": 5}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_random_batches_have_the_right_rows(make, name):
    family, options = SETTINGS[name]
    model = make(family)
    tolerance = 4e-3 if family == "gemma2" else 1e-4
    engine = model.engine(**options)
    generator = random.Random(2)
    known = [[generator.randrange(300)] for _ in range(3)]
    try:
        for _ in range(40):
            requested = [
                _continued(generator, known) for _ in range(generator.choice((1, 2, 5, 8)))
            ]
            known = [*known, *requested][-20:]
            unique = [list(ids) for ids in {tuple(ids): None for ids in requested}]
            rows = rows_of(engine, unique)
            expected = torch.stack([model.logprobs(ids) for ids in unique])
            torch.testing.assert_close(rows.double(), expected, atol=tolerance, rtol=0)
            check_memory(engine)
            text = [*generator.choice(requested)[:58], 1, 2]
            [scores] = engine.score([Query(0, text[:-1], targets=tuple(text[-2:]))])
            expected = torch.stack(
                [model.logprobs(text[:-2])[text[-2]], model.logprobs(text[:-1])[text[-1]]]
            )
            torch.testing.assert_close(
                scores.logprobs.double(), expected, atol=tolerance, rtol=0
            )
            check_memory(engine)
        assert engine.statistics()["sequences_evicted"] > 0
    finally:
        engine.close()


def _continued(generator: random.Random, known: list[list[int]]) -> list[int]:
    beginning = generator.choice(known)
    if generator.random() < 0.3:
        beginning = beginning[: generator.randrange(1, len(beginning) + 1)]
    more = generator.choice((0, 0, 1, 1, 1, 2, 9, 20))
    return (beginning + [generator.randrange(300) for _ in range(more)])[:60]


def test_a_window_that_llama_cpp_has_reused_is_computed_again(make):
    """It reuses cells outside a sequence's window, although swa_full=True was requested."""
    model = make("gemma2")
    engine = model.engine(n_ctx=256)
    first_held, memory = (
        engine._context._llama.llama_memory_seq_pos_min,
        engine._context._memory,
    )
    generator = random.Random(0)
    reused: list[int] = []
    try:
        while not reused:  # at the fourteenth
            length = generator.choice([20, 60])
            engine.evaluate([Query(0, [generator.randrange(300) for _ in range(length)])])
            reused = [n for n in engine._sequences._idle if first_held(memory, n) > 20]
        requested = [*engine._sequences._ids[reused[0], :20].tolist(), 5]
        [row] = rows_of(engine, [requested])
    finally:
        engine.close()
    torch.testing.assert_close(row.double(), model.logprobs(requested), atol=4e-3, rtol=0)


def test_no_pass_of_a_batch_loses_tokens_that_an_earlier_pass_needs(make):
    """llama.cpp assigns cells to all passes of a call before it computes the first one."""
    model = make("gemma2")
    engine = model.engine(n_ctx=256, n_batch=16, n_ubatch=8)
    generator, known = random.Random(53), []
    try:
        for _ in range(20):
            batch = [
                tuple(generator.randrange(3, 300) for _ in range(generator.randint(9, 48)))
                for _ in range(generator.randint(1, 4))
            ]
            rows = rows_of(engine, batch)
            expected = torch.stack([model.logprobs(ids) for ids in batch])
            torch.testing.assert_close(rows.double(), expected, atol=4e-3, rtol=0)
            known += batch
            while known and generator.random() < 0.5:
                ids = known.pop(generator.randrange(len(known)))
                engine.release_context(None, TokenSequence.of(ids).key)
    finally:
        engine.close()


def test_a_prompt_longer_than_the_window_is_kept_when_its_extensions_are_released(make):
    engine = make("gemma2").engine()
    prompt = list(range(40))
    try:
        engine.evaluate([Query(0, prompt)])
        for last in (5, 6, 7):
            longer = Query(1, [*prompt, last])
            engine.evaluate([longer])
            engine.release_context(None, longer.sequence.key)
            check_memory(engine)
        assert engine.statistics()["tokens_computed"] == 40 + 3
    finally:
        engine.close()


def test_scored_texts_leave_only_the_prompt_of_the_last_step(llama):
    """All later requests iterate over the cells of a shared cache."""
    engine = llama.engine(kv_unified=True)
    requested, prompt = list(range(100, 130)), list(range(20))
    try:
        engine.evaluate([Query(0, requested)])  # not only a prompt of texts
        for text, start in (
            (list(range(40, 70)), 1),
            ([*requested, *range(9)], 30),
            ([*range(200, 220), *range(9)], 20),
            ([*prompt, *range(30, 60)], 20),
            ([*prompt, *range(60, 90)], 20),
        ):
            engine.score([Query(0, text[:-1], targets=tuple(text[start:]))])
            check_memory(engine)
        lengths = engine._sequences._lengths
        assert sorted(lengths[lengths > 0].tolist()) == [20, 30]
        assert engine.statistics()["tokens_computed"] == 30 + 29 + 9 + 28 + 49 + 30
    finally:
        engine.close()


def test_more_contexts_than_sequences_and_cells(llama):
    trunk = list(range(20))
    with AsyncLM(
        lambda: llama.engine(n_seq_max=4, n_ctx=256), output_cache=OutputCache(0)
    ) as lm:
        begun = [lm.context([*trunk, i, i + 1]) for i in range(30)]
        for step in range(3):
            rows = lm.batch_next_token_logprobs_sync(begun)
            for context, row in zip(begun[::7], rows[::7], strict=True):
                expected = llama.logprobs(context.token_ids)
                torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=0)
            begun = [context.extend(step) for context in begun]


DIVIDED = [
    # tokens that all share, own tokens of each, how many, cells; parts
    (0, 20, 4, 2048, 4),
    (1, 20, 8, 2048, 8),
    (0, 20, 3, 2048, 0),  # too few
    (40, 10, 8, 2048, 0),  # they share most of their tokens
    (0, 200, 8, 2048, 0),  # no room to grow
    (0, 20, 9, 2048, 0),  # parts of fewer cells than llama.cpp allows
]


@pytest.mark.parametrize(("shared", "own", "count", "cells", "parts"), DIVIDED)
def test_a_cache_is_divided_among_sequences_that_share_little(shared, own, count, cells, parts):
    generator = random.Random(0)
    common = list(range(shared))
    tails = [[generator.randrange(300) for _ in range(own)] for _ in range(count)]
    assert choose_parts([[*common, *tail] for tail in tails], cells, 256) == parts


def test_what_the_population_shares_decides_about_the_cache(llama):
    """Divided for distinct sequences; shared when they branch, and when one outgrows a part."""
    generator = random.Random(0)
    distinct = [[i, *(generator.randrange(300) for _ in range(20))] for i in range(4)]
    longer = [9, *range(40)]
    branches = [[*distinct[0], i] for i in range(6)]

    def check(requested: list[list[int]], parts: int) -> None:
        rows = lm.batch_next_token_logprobs_sync(requested)
        for ids, row in zip(requested, rows, strict=True):
            expected = llama.logprobs(ids)
            torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=0)
        assert engine._context.parts == parts

    engine = llama.engine(n_ctx=1024)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        lm.load_lora(llama.adapters["red"], "red")
        assert lm.max_context == 64  # of the model; it does not change with the cache
        check(distinct, 4)
        check([[*ids, 5] for ids in distinct], 4)
        adapted = lm.next_token_logprobs_sync(distinct[1], lora_name="red")
        torch.testing.assert_close(
            adapted.double(), llama.logprobs(distinct[1], "red"), atol=1e-4, rtol=0
        )
        check(branches, 0)
        check(distinct, 0)  # others are held: nothing is thrown away
        lm.clear_kv_cache()
        check([longer], 0)
        lm.clear_kv_cache()
        check(distinct, 4)
        lm.pin_prefix(longer)
        check([*distinct, [*longer, 3]], 0)


def extensions(added, seq_ids, sources=None, first=2):
    """Sequences that held two tokens before."""
    counts = np.array([len(ids) for ids in added])
    twos = np.full(len(added), 2)
    token_ids = np.concatenate(added)
    sources = np.array(seq_ids if sources is None else sources)
    rows = Extensions(sources, twos, twos, token_ids, counts, np.full(len(added), first))
    rows.seq_ids = np.array(seq_ids)
    return rows


def test_a_batch_of_a_divided_cache_is_in_the_order_of_its_sequences():
    """llama.cpp computes sequences with consecutive ids at once."""
    rows = extensions([(5,), (6,), (7,)], seq_ids=[2, 0, 1])
    batch = build_batch(rows, shared=False)
    assert batch.tokens.tolist() == [6, 7, 5]
    assert batch.results.tolist() == [2, 0, 1]


def test_parts_of_a_divided_cache_may_have_tokens_of_one_sequence_only():
    rows = extensions([(5, 6), (6, 7, 8), (7, 8)], seq_ids=[2, 0, 1])
    batch = build_batch(rows, shared=False)
    parts = [(part.first, part.end) for part in batch.parts(2, 9, separately=True)]
    assert parts == [(0, 2), (2, 3), (3, 5), (5, 7)]
    assert [(part.first, part.end) for part in batch.parts(5, 9)] == [(0, 5), (5, 7)]


def test_a_divided_cache_with_windows_computes_sequences_one_after_the_other(make, monkeypatch):
    model = make("gemma2")
    engine, counts = model.engine(n_seq_max=8, kv_unified=False), []
    decode = LlamaContext.decode

    def counted(own, batch, part):
        counts.append(part.end - part.first)
        return decode(own, batch, part)

    monkeypatch.setattr(LlamaContext, "decode", counted)
    try:
        for batch in [[(5, 6, 7), (8, 9)], [(5, 6, 7, 8), (8, 9, 7)]]:
            rows = rows_of(engine, batch)
            expected = torch.stack([model.logprobs(ids) for ids in batch])
            torch.testing.assert_close(rows.double(), expected, atol=4e-3, rtol=0)
    finally:
        engine.close()
    assert counts == [3, 2, 2]  # one call for a token of each


def test_tokens_that_sequences_lack_in_common_are_in_the_batch_once():
    """Only of those that held equal tokens before; logits are requested from position 3 on."""
    added = [(5, 6, 7), (5, 6), (5, 8), (9,), (9, 6)]
    rows = extensions(added, seq_ids=[3, 1, 4, 2, 0], sources=[3, 3, 3, 3, 6], first=3)
    batch = build_batch(rows, shared=True)
    owners: dict[int, list[tuple[int, int]]] = {seq_id: [] for seq_id in rows.seq_ids.tolist()}
    places = np.cumsum(batch.counts) - batch.counts
    for entry, (place, count) in enumerate(zip(places, batch.counts, strict=True)):
        assert batch.addresses[entry] == batch.seq_ids.ctypes.data + 4 * place
        for seq_id in batch.seq_ids[place : place + count].tolist():
            owners[seq_id].append((int(batch.positions[entry]), int(batch.tokens[entry])))
    for seq_id, ids in zip(rows.seq_ids.tolist(), added, strict=True):
        assert owners[seq_id] == list(enumerate(ids, 2))
    assert len(batch.tokens) == 5 + 2
    wanted = list(
        zip(
            batch.positions[batch.results].tolist(),
            batch.tokens[batch.results].tolist(),
            strict=True,
        )
    )
    assert wanted == [(3, 6), (4, 7), (3, 6), (3, 8), (3, 6)]
    assert np.flatnonzero(batch.outputs).tolist() == sorted(set(batch.results.tolist()))


def test_a_cache_that_was_asked_for_is_not_changed(llama):
    distinct = [[i, *range(20)] for i in range(4)]
    engine = llama.engine(kv_unified=True)
    try:
        engine.evaluate([Query(i, ids) for i, ids in enumerate(distinct)])
        assert engine._context.parts == 0
    finally:
        engine.close()


@pytest.mark.parametrize("method", ["_create", "_check_context"])
def test_a_cache_that_cannot_be_created_is_created_later(llama, monkeypatch, method):
    """Without memory for parts it is shared; without any, queries fail until there is.

    The same holds for a context that has other parameters than requested.
    """
    distinct = [[i, *range(20)] for i in range(4)]
    expected = torch.stack([llama.logprobs(ids) for ids in distinct])
    called = getattr(LlamaContext, method)
    engine = llama.engine(n_ctx=1024)
    refused = {True, False}

    def without_memory(self, *arguments):
        if arguments[-1].kv_unified in refused:
            raise ModelLoadError("no memory")
        return called(self, *arguments)

    monkeypatch.setattr(LlamaContext, method, without_memory)
    try:
        with pytest.raises(EvaluationError, match="no memory"):
            rows_of(engine, distinct)
        engine.clear_prefix_cache()
        refused.remove(True)
        rows = rows_of(engine, distinct)
        assert engine._context.parts == 0
        torch.testing.assert_close(rows.double(), expected, atol=1e-4, rtol=0)
        engine.clear_prefix_cache()
        refused.clear()
        assert rows_of(engine, distinct).isfinite().all()
        assert engine._context.parts == 4
    finally:
        engine.close()


def test_a_dropped_context_gives_its_tokens_back(llama):
    engine = llama.engine()
    try:
        prompt = TokenSequence.of([5, 6, 7])
        longer = TokenSequence.of([8], prompt)
        engine.evaluate([Query(0, prompt)])
        engine.evaluate([Query(1, longer)])
        assert engine._context.held(0) == 4  # the same sequence was continued
        engine.release_context(None, longer.key)
        assert engine._context.held(0) == 3  # the prompt is still referred to
        engine.release_context(None, prompt.key)
        assert engine.statistics()["sequences"] == 0
    finally:
        engine.close()


def test_kept_prefixes_leave_a_sequence_for_others(llama):
    with AsyncLM(lambda: llama.engine(n_seq_max=2), output_cache=OutputCache(0)) as lm:
        lm.pin_prefix([5, 6, 7])
        with pytest.raises(EvaluationError, match="no sequence would remain"):
            lm.pin_prefix([8, 9])
        lm.next_token_logprobs_sync([5, 6, 7, 8])
        before = lm.statistics().engine["tokens_computed"]
        lm.next_token_logprobs_sync([5, 6, 7, 9])
        assert lm.statistics().engine["tokens_computed"] == before + 1


def test_a_prefix_that_is_kept_again_takes_no_further_sequence(llama):
    engine = llama.engine(n_seq_max=3)
    with AsyncLM(lambda: engine, output_cache=OutputCache(0)) as lm:
        lm.load_lora(llama.adapters["red"], "red")
        for adapter in (None, "red"):
            for _ in range(3):
                lm.pin_prefix([5, 6, 7], lora_name=adapter)
                lm.next_token_logprobs_sync([5, 6, 7], lora_name=adapter)
        assert engine._sequences.pinned == 2
        with pytest.raises(EvaluationError, match="no sequence would remain"):
            lm.pin_prefix([5, 6])
        lm._scheduler.run(check_memory)


def test_a_kept_prefix_gives_way_to_a_context_that_needs_the_room(llama):
    """A cache of 256 cells; kept prefixes take most of it."""
    with AsyncLM(lambda: llama.engine(n_ctx=256), output_cache=OutputCache(0)) as lm:
        for first in range(4):
            lm.pin_prefix([first, *range(59)])
        requested = [100, *range(200, 250)]
        row = lm.next_token_logprobs_sync(requested)
    torch.testing.assert_close(row.double(), llama.logprobs(requested), atol=1e-4, rtol=0)


def test_a_context_of_a_recurrent_model_is_continued_when_it_is_asked_again(make):
    model = make("mamba")
    engine = model.engine()
    ids = tuple(range(3, 43))
    computed = []
    for query_id, sequence in enumerate([ids[:-1], ids, ids]):
        before = engine.statistics()["tokens_computed"]
        engine.submit(Query(query_id, sequence))
        [answer] = engine.step()
        assert float((answer.result - model.logprobs(sequence)).abs().max()) <= 1e-4
        computed.append(engine.statistics()["tokens_computed"] - before)
    assert computed == [39, 1, 1]
