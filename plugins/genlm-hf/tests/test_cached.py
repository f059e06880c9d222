"""Execution paths with a cache against unbatched passes: eviction, forks, errors."""

from __future__ import annotations

import gc
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm import Capability, EvaluationError, PrefixCacheEngine
from genlm_hf.engine import HFEngine
from genlm_hf.packed import attention, device_plan, plan

from .families import FAMILIES, family
from .population import Oracle, bytes_per_token, particles, unique, used
from .test_adapters import make_adapter
from .tiny import VOCAB_SIZE, alone, answers, build_model, ids_of_lengths

_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "grouped heads": family("llama"),
    "a window of 4 tokens": family("mistral", sliding_window=4),
    "windows in some layers": family(
        "gemma3_text", head_dim=8, sliding_window=5, num_hidden_layers=3, layer_types=_LAYERS
    ),
    "learned positions": (
        "gpt2",
        {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
}
CASES = [("packed", *MODELS[name]) for name in MODELS]
CASES += [("slot_cache", *MODELS[name]) for name in MODELS]
CASES += [("packed", *FAMILIES[name]) for name in ("gpt_oss", "gemma2 with capped scores")]
CASES += [
    ("slot_cache", *FAMILIES[name])
    for name in ("gptj", "gpt_neo", "bloom", "mpt", "falcon", "falcon with grouped heads")
]
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # of the tiny Llama: layers, K and V, heads, width, float32


@pytest.fixture(autouse=True)
def one_program() -> None:
    random.seed(11)


@pytest.fixture(params=["packed", "slot_cache"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("slots", [None, 130, 40])
@pytest.mark.parametrize(("path", "model_type", "settings"), CASES)
def test_rows_do_not_depend_on_forks_duplicates_eviction_or_budget(
    path: str, model_type: str, settings: dict[str, Any], slots: int | None, tokenizer: Any
) -> None:
    model = build_model(model_type, **settings)
    oracle = Oracle(model)
    budget = None if slots is None else slots * bytes_per_token(model, tokenizer, path)
    engine = HFEngine.from_model(
        model, tokenizer, execution_path=path, kv_budget_bytes=budget, self_test=False
    )
    prompt = ids_of_lengths(20)[0]
    for contexts in particles(5, 6, prompt):
        batch = unique([*contexts, *ids_of_lengths(3, 50, 11)[: random.randrange(4)]])
        assert oracle.largest_error(batch, answers(engine, batch)) <= 1e-4
        again = random.sample(batch, 3)
        assert oracle.largest_error(again, answers(engine, again)) <= 1e-4
        assert used(engine, "kv_bytes_used") <= used(engine, "kv_budget_bytes")
        tensors = itertools.chain(*engine._choice.path.forward.storage._tensors)
        assert sum(each.nbytes for each in tensors) <= used(engine, "kv_budget_bytes")
    if slots is None:
        assert used(engine, "tokens_evicted") == used(engine, "contexts_without_cache") == 0
    else:
        assert used(engine, "tokens_evicted") > 0
        assert (used(engine, "contexts_without_cache") > 0) == (slots == 40)


@pytest.mark.parametrize(
    "name", ["llama", "mistral with a short window", "gpt_oss", "gemma2 with capped scores"]
)
def test_scores_made_a_few_rows_at_a_time_give_the_same(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MASK_ENTRIES", 300)
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer, execution_path="packed")
    oracle, [prompt] = Oracle(model), ids_of_lengths(40)
    for step in ([prompt], [[*prompt[:30], *prompt[:25]], *ids_of_lengths(50, 12)]):
        assert oracle.largest_error(step, answers(engine, step)) <= 1e-5


@pytest.mark.parametrize("limit", [1, 1500])
@pytest.mark.parametrize(
    "name", ["llama", "mistral with a short window", "gpt_oss", "gemma2 with capped scores"]
)
def test_suffixes_gathered_a_few_tokens_at_a_time_give_the_same(
    name: str, limit: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plan, "_GATHERED_BYTES", limit)
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer, execution_path="packed")
    oracle, sequences = Oracle(model), ids_of_lengths(20, 9, 12, 3, 7, 11, 1)
    for _ in range(3):
        assert oracle.largest_error(sequences, answers(engine, sequences)) <= 1e-5
        sequences = [[*ids, 5] for ids in sequences]


@pytest.mark.parametrize("limit", [1, 2**20])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral with a short window"])
def test_prefixes_attended_to_apart_from_suffixes_give_the_same(
    name: str, limit: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def attend(layer: Any, query: torch.Tensor, group: Any) -> torch.Tensor:
        calls.append(group.count)
        return plain(layer, query, group)

    plain = attention._Attention._compute_plain_group
    monkeypatch.setattr(attention._Attention, "_compute_plain_group", attend)
    monkeypatch.setattr(attention, "_MANY_SCORES", 1)
    monkeypatch.setattr(plan, "_GROUP_COST", 0)
    monkeypatch.setattr(device_plan, "_GATHERED_BYTES", limit)
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer, execution_path="packed")
    oracle, [prompt] = Oracle(model), ids_of_lengths(40)
    for length in (1, 2, 3):
        sequences = [[*prompt, *([token] * length)] for token in range(3, 12)]
        assert oracle.largest_error(sequences, answers(engine, sequences)) <= 1e-5
    assert len(calls) >= 3 or "mistral" in name  # whose window hides keys


@pytest.mark.parametrize(
    ("name", "forgotten"), [("gpt_oss", "sinks"), ("gemma2 with capped scores", "softcap")]
)
def test_forgotten_sinks_and_caps_are_found_by_the_self_test(
    name: str, forgotten: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = attention._Attention._weights

    def forgetful(layer: Any, *scores: Any) -> torch.Tensor:
        setattr(layer, f"_{forgotten}", None)
        return weights(layer, *scores)

    monkeypatch.setattr(attention._Attention, "_weights", forgetful)
    model_type, settings = FAMILIES[name]
    figures = HFEngine.from_model(build_model(model_type, **settings), tokenizer).statistics()
    assert figures["execution_path"] == "slot_cache"
    assert "not packed: in the self-test" in str(figures["execution_path_reason"])


def test_every_token_is_computed_once(path: str, llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    before, forwards = used(engine, "tokens_computed"), used(engine, "forwards")
    prompt = ids_of_lengths(30)[0]
    answers(engine, [prompt])
    answers(engine, [[*prompt, i] for i in range(3, 13)])
    answers(engine, [[*prompt, 3, 4], [*prompt, 3, 5, 6], [*prompt, 12, 4]])
    assert used(engine, "tokens_computed") - before == 30 + 10 + 1 + 2 + 1
    assert used(engine, "kv_tokens") == 44
    answers(engine, [[*prompt, 3, 4], prompt[:7]])  # known: only their last tokens
    assert used(engine, "tokens_computed") - before == 46
    assert used(engine, "forwards") == forwards + 4


def test_what_is_cached_is_never_written_again(path: str, llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    [ids] = ids_of_lengths(20)
    answers(engine, [ids])
    slots = range(1, 21)
    tensors = [
        states for pair in engine._choice.path.forward.storage._tensors for states in pair
    ]
    before = [states[:, slots].clone() for states in tensors]
    answers(engine, [ids, *ids_of_lengths(7, 30)])
    answers(engine, [[*ids, 3], ids[:12], [*ids[:12], 4]])
    after = [states[:, slots] for states in tensors]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_slots_hold_before_they_are_written_reaches_no_row(
    path: str, llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    for pair in engine._choice.path.forward.storage._tensors:
        for states in pair:
            states.fill_(float("nan"))
    oracle = Oracle(llama)
    [prompt] = ids_of_lengths(9)
    for step in ([prompt], [[*prompt, 5], [7]], ids_of_lengths(9, 1, 23)):
        assert oracle.largest_error(step, answers(engine, step)) <= 1e-4


def test_more_than_a_pass_takes_is_run_in_several(
    path: str, llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path, max_tokens_per_batch=40)
    before = used(engine, "forwards")
    sequences = ids_of_lengths(30, 20, 5, 50, 4, 4)
    rows = answers(engine, sequences)
    assert Oracle(llama).largest_error(sequences, rows) <= 1e-4
    # 30 + 5 + 4 · 20 + 4 · 40 · the other 10; padded to 40 at most, 5 + 4 go apart.
    assert used(engine, "forwards") - before == {"packed": 4, "slot_cache": 5}[path]


@pytest.mark.parametrize("slots", [None, 400])
@pytest.mark.parametrize("max_tokens", [7, 64, 10**6])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("packed", "llama"),
        ("packed", "mistral with a short window"),
        ("slot_cache", "llama"),
        ("slot_cache", "gptj"),
    ],
)
def test_no_pass_has_more_tokens_than_allowed_however_long_a_prompt(
    path: str, name: str, max_tokens: int, slots: int | None, tokenizer: Any
) -> None:
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **{**settings, "max_position_embeddings": 400})
    sizes: list[int] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        sizes.append(kwargs["input_ids"].numel())

    oracle = Oracle(model)
    budget = None if slots is None else slots * bytes_per_token(model, tokenizer, path)
    engine = HFEngine.from_model(
        model,
        tokenizer,
        execution_path=path,
        max_tokens_per_batch=max_tokens,
        kv_budget_bytes=budget,
        self_test=False,
    )
    model.register_forward_pre_hook(note, with_kwargs=True)
    prompt, other = ids_of_lengths(300, 90)
    before = used(engine, "tokens_computed")
    for step in (
        [prompt, other[:5]],
        [prompt, [*prompt, 5], [*prompt[:200], *other], other[:20]],
        [[*other, 7], other, prompt[:250]],
    ):
        assert oracle.largest_error(step, answers(engine, step)) <= 1e-4
    assert max(sizes) <= max_tokens
    assert (max(sizes) >= 300) == (max_tokens > 300)
    if slots is None:
        assert used(engine, "kv_tokens") == 300 + 5 + (1 + 90 + 15) + 71
        # Again, for their logits: the last tokens of two or three known contexts.
        assert used(engine, "tokens_computed") - before - used(engine, "kv_tokens") in {2, 3}


@pytest.mark.parametrize("place", ["embedding", "layer 0", "layer 1", "attention 1", "head"])
def test_a_pass_that_raises_leaves_nothing_that_looks_computed(
    path: str, place: str, llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    oracle = Oracle(llama)
    module = {
        "embedding": llama.model.embed_tokens,
        "layer 0": llama.model.layers[0],
        "layer 1": llama.model.layers[1],
        "attention 1": llama.model.layers[1].self_attn,
        "head": llama.lm_head,
    }[place]
    prompt = ids_of_lengths(12)[0]
    steps = [[prompt], [[*prompt, 3], [*prompt, 4, 5], [*prompt[:5], 7]], [[*prompt, 3, 9]]]
    for step in steps:
        before = used(engine, "kv_tokens")

        def broken(*_: Any) -> None:
            raise RuntimeError("out of memory")

        handle = module.register_forward_hook(broken)
        assert all(isinstance(row, RuntimeError) for row in answers(engine, step))
        handle.remove()
        assert used(engine, "kv_tokens") == before
        assert llama.config._attn_implementation == "sdpa"
        assert oracle.largest_error(step, answers(engine, step)) <= 1e-4


def test_only_the_sequence_that_raises_fails(path: str, llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)

    def picky(_: Any, args: Any) -> None:
        if (args[0] == 99).any():
            raise RuntimeError("99")

    handle = llama.model.embed_tokens.register_forward_pre_hook(picky)
    sequences = [[3, 4], [3, 99], [3, 99, 5], [3, 4, 5]]
    rows = answers(engine, sequences)
    handle.remove()
    assert [isinstance(row, RuntimeError) for row in rows] == [False, True, True, False]
    assert Oracle(llama).largest_error([[3, 4], [3, 4, 5]], [rows[0], rows[3]]) <= 1e-4
    assert Oracle(llama).largest_error(sequences, answers(engine, sequences)) <= 1e-4


def test_adapters_never_see_each_others_keys_and_values(
    path: str, llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    adapted = {
        name: make_adapter(llama, tmp_path / name, seed) for seed, name in enumerate("rb")
    }
    oracles = {None: Oracle(llama), **{name: Oracle(m) for name, m in adapted.items()}}
    engine = HFEngine.from_model(
        llama, tokenizer, execution_path=path, kv_budget_bytes=100 * TOKEN_BYTES
    )
    sequences = ids_of_lengths(9, 14)
    before = [row.clone() for row in answers(engine, sequences)]
    for name in adapted:
        engine.add_adapter(name, str(tmp_path / name))
    for step in range(4):
        requests = [(ids, name) for ids in sequences for name in (None, "r", "b")]
        for (ids, name), row in zip(requests, answers(engine, requests), strict=True):
            assert oracles[name].largest_error([ids], [row]) <= 1e-4
        if step == 0:
            assert used(engine, "kv_tokens") == 3 * 23
        sequences = [[*ids, step + 3] for ids in sequences]
    assert used(engine, "tokens_evicted") == 0
    engine.close()
    assert float((alone(llama, ids_of_lengths(9)[0]) - before[0]).abs().max()) <= 1e-4


def test_a_kept_prefix_is_computed_once_and_survives_a_full_cache(
    path: str, llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(
        llama, tokenizer, execution_path=path, kv_budget_bytes=61 * TOKEN_BYTES
    )
    assert Capability.PREFIX_CACHE in engine.capabilities
    assert isinstance(engine, PrefixCacheEngine)
    oracle = Oracle(llama)
    prompt, *siblings = ids_of_lengths(25, 30, 33, 35)
    engine.cache_prefix(prompt, None)
    for other in siblings:
        assert oracle.largest_error([other], answers(engine, [other])) <= 1e-4
    before = used(engine, "tokens_computed")
    longer = [*prompt, 5, 6]
    assert oracle.largest_error([longer], answers(engine, [longer])) <= 1e-4
    assert used(engine, "tokens_computed") == before + 2
    with pytest.raises(EvaluationError, match="does not fit into the 60 tokens"):
        engine.cache_prefix([9, *prompt, *prompt], None)
    engine.clear_prefix_cache()
    assert used(engine, "kv_tokens") == 0
    assert oracle.largest_error([longer], answers(engine, [longer])) <= 1e-4
    assert used(engine, "kv_tokens") == 27


def test_a_budget_without_room_for_a_token_still_serves(
    path: str, llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path, kv_budget_bytes=10)
    sequences = ids_of_lengths(9, 1)
    assert Oracle(llama).largest_error(sequences, answers(engine, sequences)) <= 1e-4
    assert used(engine, "kv_bytes_used") == 0


def test_a_context_beyond_the_budget_lets_go_of_the_prefix_that_it_shares(
    path: str, llama: Any, tokenizer: Any
) -> None:
    engine = HFEngine.from_model(
        llama, tokenizer, execution_path=path, kv_budget_bytes=9 * TOKEN_BYTES
    )
    oracle = Oracle(llama)
    short, long = [5, 6, 7], [5, 6, 7, *range(20, 40)]
    other = list(range(50, 57))  # fits only where the short one was
    before = used(engine, "contexts_without_cache")  # those of the self-test
    for step in ([short], [long], [other], [long, other, short]):
        rows = answers(engine, step)
        assert oracle.largest_error(step, rows) < 1e-4
    assert used(engine, "contexts_without_cache") == before + 2
    engine.clear_prefix_cache()
    assert used(engine, "kv_tokens") == 0


def test_many_requests_leave_no_growth(path: str, llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(
        llama, tokenizer, execution_path=path, kv_budget_bytes=64 * TOKEN_BYTES
    )
    tree = engine._choice.path._tree
    objects = []
    for _ in range(4):
        for _ in range(150):
            answers(engine, unique([random.choices(range(3, 6), k=9) for _ in range(4)]))
        gc.collect()
        objects.append(len(gc.get_objects()))
        assert used(engine, "kv_tokens") <= 63
        assert sum(1 for root in tree._roots.values() for _ in root.descendants()) <= 63
        assert not tree._in_use
        assert not tree._uncached
    # Of 450 steps; the tree may have a few nodes more or fewer.
    assert objects[-1] - objects[0] < 450


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(
    path: str, llama: Any, tokenizer: Any, dtype: torch.dtype
) -> None:
    sequences = ids_of_lengths(9, 1, 23)
    expected = [alone(llama, ids) for ids in sequences]
    engine = HFEngine.from_model(llama.to(dtype), tokenizer, execution_path=path)
    for row, exact in zip(answers(engine, sequences), expected, strict=True):
        assert row.shape == (VOCAB_SIZE,)
        assert (row - exact).abs().max() <= {torch.bfloat16: 1e-1, torch.float16: 1e-2}[dtype]
