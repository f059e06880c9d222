"""Segments and their batches, and models that attend in code of their own."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from genlm import ModelLoadError, Query
from genlm_hf.engine import HFEngine
from genlm_hf.gathered import cache
from genlm_hf.gathered.plan import (
    GatherLimits,
    Segment,
    SegmentBatch,
    group_segments,
    waves_of,
)
from genlm_hf.kv.batch import TreeBatch
from genlm_hf.kv.slots import SCRATCH_SLOT
from genlm_hf.kv.tree import PrefixTree
from genlm_hf.tiers import choice
from genlm_hf.tiers.padded import PaddedTier

from .families import FAMILIES
from .population import Oracle, used
from .tiny import answers, build_model, ids_of_lengths


def segment(past: int, length: int) -> Segment:
    slots = np.arange(1, past + length + 1)
    return Segment(tuple(range(3, 3 + length)), slots, slots[past:])


LIMITS = GatherLimits(max_tokens=200, max_context=100)
shapes = st.tuples(st.integers(0, 80), st.integers(1, 20))


@settings(max_examples=200, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=60))
def test_each_segment_is_in_one_batch_that_keeps_the_limits(
    wanted: list[tuple[int, int]],
) -> None:
    segments = [segment(*shape) for shape in wanted]
    batches = list(group_segments(segments, LIMITS))
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, segments))
    for members in batches:
        batch = SegmentBatch(members, pad_id=0)
        padding = batch.tokens.size - sum(len(member.tokens) for member in members)
        assert batch.tokens.size <= 200
        assert batch.reads.shape[1] <= 100
        assert padding <= 64


def test_a_segment_beyond_the_limits_runs_alone() -> None:
    long, short = segment(40, 500), segment(0, 3)
    assert sorted(map(len, group_segments([long, short], LIMITS))) == [1, 1]


def test_long_pasts_are_not_gathered_for_short_ones() -> None:
    limits = GatherLimits(max_tokens=1000, max_context=None)
    short, long = [segment(5, 1) for _ in range(60)], [segment(900, 1)]
    assert sorted(map(len, group_segments(short + long, limits))) == [1, 60]
    similar = [segment(past, 1) for past in range(20, 80)]
    assert list(map(len, group_segments(similar, limits))) == [60]


@settings(max_examples=100, deadline=None)
@given(st.lists(shapes, min_size=1, max_size=8))
def test_a_batch_reads_each_past_and_writes_each_token(wanted: list[tuple[int, int]]) -> None:
    members = [segment(*shape) for shape in wanted]
    batch = SegmentBatch(members, pad_id=0)
    for row, member in enumerate(members):
        count = len(member.tokens)
        read = batch.reads[row][batch.is_token[row]]
        assert np.array_equal(read, member.slots)
        # The new tokens lie where the model appends them: after the longest past.
        assert np.array_equal(
            np.flatnonzero(batch.is_token[row])[-count:] - batch.past, range(count)
        )
        assert tuple(batch.tokens[row, :count]) == member.tokens
        assert np.array_equal(batch.writes[row, :count], member.writes)
        assert (batch.writes[row, count:] == SCRATCH_SLOT).all()
        assert np.array_equal(batch.positions[row, :count], member.past + np.arange(count))
        assert set(batch.reads[row]) <= set(member.slots)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sets(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), min_size=1),
        min_size=1,
        max_size=3,
    )
)
def test_a_wave_needs_only_what_earlier_ones_wrote(
    steps: list[set[tuple[int, ...]]],
) -> None:
    tree = PrefixTree(10_000)
    known: set[int] = set()
    for step in steps:
        sequences = sorted(step)
        last_slots = [tree.insert(None, ids) for ids in sequences]
        asked = dict(zip(last_slots, sequences, strict=True))
        fresh = tree.fresh_tokens
        for wave in waves_of(TreeBatch(tree, None, sequences, last_slots)):
            written = set()
            for member in wave:
                assert set(member.slots[: member.past].tolist()) <= known
                new = member.slots[member.past :].tolist()
                written.update(set(new) - known)
                for place, slot in enumerate(new):
                    if slot in asked:
                        assert asked.pop(slot)[-1] == member.tokens[place]
                again = set(new) <= known
                assert (set(member.writes.tolist()) == {SCRATCH_SLOT}) == again
            known |= written
            fresh -= len(written)
        assert fresh == 0
        assert not asked
        tree.commit()


@pytest.fixture
def gptj() -> Any:
    model_type, options = FAMILIES["gptj"]
    return build_model(model_type, **options)


def test_a_prefix_that_is_new_to_all_is_computed_once_and_first(
    gptj: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(gptj, tokenizer)
    before, forwards = used(engine, "tokens_computed"), used(engine, "forwards")
    prompt = ids_of_lengths(20)[0]
    sequences = [[*prompt, i] for i in range(3, 13)]
    assert Oracle(gptj).largest_error(sequences, answers(engine, sequences)) <= 1e-5
    assert used(engine, "tokens_computed") - before == 20 + 10
    assert used(engine, "forwards") - forwards == 2


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "mpt", "codegen"])
def test_padding_never_reaches_beyond_the_positions_that_a_model_has(
    name: str, tokenizer: Any
) -> None:
    model_type, options = FAMILIES[name]
    names = {"gpt_neo": "max_position_embeddings", "mpt": "max_seq_len"}
    model = build_model(model_type, **options | {names.get(name, "n_positions"): 64})
    engine = HFEngine.from_model(model, tokenizer)
    assert engine.statistics()["tier"] == "gathered"
    long, new = ids_of_lengths(60, 33)
    oracle = Oracle(model)
    for step in ([long], [[*long, 4], new], [[*new, 4], [*long, 9]]):
        # Not by way of `step`, which would try again with each sequence alone.
        queries = [Query(i, tuple(ids)) for i, ids in enumerate(step)]
        assert oracle.largest_error(step, list(engine.evaluate(queries))) <= 1e-5


def test_chunks_too_long_for_the_self_test_are_refused_by_their_masks(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, options = FAMILIES["llama4_text"]
    model = build_model(model_type, **options | {"attention_chunk_size": 8192})
    monkeypatch.setattr(choice, "_refuse_by_config", lambda served: None)
    figures = HFEngine.from_model(model, tokenizer).statistics()
    assert figures["tier"] == "padded"
    assert str(figures["tier_reason"]).count("one of its masks is unknown") == 2


def test_models_that_padding_disturbs_are_not_gathered(
    gptj: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PaddedTier, "pads", False)
    with pytest.raises(
        ModelLoadError, match=r"tier='gathered' cannot serve .* padding changes"
    ):
        HFEngine.from_model(gptj, tokenizer, tier="gathered")


def test_models_with_other_caches_are_not_gathered(tokenizer: Any) -> None:
    for name, reason in {
        "rwkv": "takes no past_key_values",
        "recurrent_gemma": "only its layers",
        "lfm2": "layers of kind conv",
    }.items():
        model_type, options = FAMILIES[name]
        model = build_model(model_type, **options)
        with pytest.raises(ModelLoadError, match=reason):
            HFEngine.from_model(model, tokenizer, tier="gathered")


@pytest.mark.parametrize("name", ["gptj", "bloom", "falcon with grouped heads"])
def test_layers_that_share_memory_for_their_pasts_give_the_same(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LARGE", 0)
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer, tier="gathered")
    oracle, sequences = Oracle(model), ids_of_lengths(20, 9, 3, 1)
    for _ in range(3):
        assert oracle.largest_error(sequences, answers(engine, sequences)) <= 1e-5
        sequences = [[*ids, 5] for ids in sequences]
