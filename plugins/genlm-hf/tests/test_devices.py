"""Models on accelerators and spread over several, as far as a CPU can show it.

The accelerators are simulated; see `pretend_device`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from pretend_device import FIRST, SECOND, Pretence, moved

from genlm import AsyncLM, Capability, Mask, OutputCache, Query, UnsupportedCapabilityError
from genlm.core.rows.reductions import Draw
from genlm.core.rows.row_masks import RowMasks
from genlm_hf import engine as engine_module
from genlm_hf import storage
from genlm_hf.engine import HFEngine
from genlm_hf.storage import LayerShape, default_budget_bytes

from .families import FAMILIES
from .population import Oracle, particles, used
from .test_adapters import make_adapter
from .tiny import alone, answers, build_model, ids_of_lengths, llama_settings


def on_disk(*names: str) -> dict[str, str]:
    """A device map with these modules on disk and all others on the CPU."""
    modules = [f"model.{name}" for name in ("embed_tokens", "layers.0", "layers.1", "norm")]
    device_map = dict.fromkeys([*modules, "model.rotary_emb", "lm_head"], "cpu")
    return device_map | dict.fromkeys(names, "disk")


MAPS: dict[str, Any] = {
    "auto": "auto",
    "half on disk": on_disk("model.layers.1", "model.norm"),
    "embedding on disk": on_disk("model.embed_tokens"),
    "head on disk": on_disk("lm_head"),
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize("path", ["packed", "slot_cache", "padded"])
@pytest.mark.parametrize("where", MAPS)
def test_a_device_map_changes_no_row(
    where: str, path: str, folder: Path, tmp_path: Path, llama: Any
) -> None:
    options = {"device_map": MAPS[where], "offload_folder": str(tmp_path)}
    engine = HFEngine(folder, hf_opts=options, dtype="float32", execution_path=path)
    oracle, sequences = Oracle(llama), ids_of_lengths(9, 1, 23)
    for step in (sequences, [[*ids, 5] for ids in sequences]):
        assert oracle.largest_error(step, answers(engine, step)) <= 1e-5


@pytest.mark.parametrize(("device_map", "steps"), [(None, 2), (on_disk("model.layers.1"), 1)])
def test_passes_are_smaller_on_a_cpu_unless_each_loads_weights(
    device_map: Any, steps: int, folder: Path, tmp_path: Path
) -> None:
    options = {"device_map": device_map, "offload_folder": str(tmp_path)} if device_map else {}
    engine = HFEngine(folder, hf_opts=options)
    for query_id, ids in enumerate(ids_of_lengths(*[100] * 30)):
        engine.submit(Query(query_id, tuple(ids)))
    assert [bool(engine.step()) for _ in range(3)] == [i < steps for i in range(3)]


def test_a_model_with_offloaded_layers_takes_no_adapters_or_weights(
    folder: Path, tmp_path: Path, llama: Any
) -> None:
    options = {"device_map": MAPS["half on disk"], "offload_folder": str(tmp_path)}
    engine = HFEngine(folder, hf_opts=options, dtype="float32")
    assert engine.capabilities == {Capability.PREFIX_CACHE, Capability.SCORE}
    with pytest.raises(UnsupportedCapabilityError, match="device_map offloads layers"):
        engine.add_adapter("red", str(tmp_path))
    with pytest.raises(
        UnsupportedCapabilityError, match="load the new weights with load_model"
    ):
        engine.update_weights(llama.state_dict())
    sequences = ids_of_lengths(9, 1, 23)
    assert Oracle(llama).largest_error(sequences, answers(engine, sequences)) <= 1e-5


def spread_out(model: Any) -> Any:
    """Put all after the first of two layers on the second device, as accelerate would."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    children = dict(model.base_model.named_children())
    norm = [child for name, child in children.items() if name.startswith(("norm", "ln"))][-1]
    moved(model, FIRST)
    add_hook_to_module(model, AlignDevicesHook(FIRST, io_same_device=True))
    add_hook_to_module(layers[0], AlignDevicesHook(FIRST))
    for module in (layers[1], norm, model.get_output_embeddings()):
        add_hook_to_module(moved(module, SECOND), AlignDevicesHook(SECOND))
    return model


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "packed"),
        ("llama", "slot_cache"),
        ("llama", "padded"),
        ("mistral with a short window", "packed"),
        ("granite_swa", "packed"),
        ("gptj", "slot_cache"),
        ("bloom", "slot_cache"),
    ],
)
@pytest.mark.parametrize("spread", [False, True], ids=["one", "two"])
def test_accelerators_change_no_row(
    name: str, path: str, tokenizer: Any, *, spread: bool
) -> None:
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, tie_word_embeddings=False, **settings)
    oracle = Oracle(model)
    with Pretence(has_float64=False):
        model = spread_out(model) if spread else moved(model, SECOND)
        engine = HFEngine.from_model(
            model, tokenizer, execution_path=path, kv_budget_bytes=10_000
        )
        random.seed(0)
        for step in particles(6, 4, ids_of_lengths(9)[0]):
            rows = answers(engine, step)
            assert {row.device for row in rows} == {FIRST if spread else SECOND}
            assert oracle.largest_error(step, [row.cpu() for row in rows]) <= 1e-5
    if path != "padded":
        assert used(engine, "tokens_evicted") > 0
        devices = [
            {keys.device, values.device}
            for keys, values in engine._choice.path.forward.storage._tensors
        ]
        assert devices == [{FIRST if spread else SECOND}, {SECOND}]


@pytest.mark.parametrize("spread", [False, True], ids=["one", "two"])
def test_a_packed_pass_copies_its_plan_to_each_accelerator_once(
    llama: Any, tokenizer: Any, *, spread: bool
) -> None:
    with Pretence() as pretence:
        model = spread_out(llama) if spread else moved(llama, FIRST)
        engine = HFEngine.from_model(model, tokenizer, execution_path="packed")
        random.seed(0)
        groups_and_runs = [*ids_of_lengths(9, 30), [5, 6]]
        for step in (groups_and_runs, *particles(6, 4, groups_and_runs[0])):
            distinct = [list(ids) for ids in dict.fromkeys(map(tuple, step))]
            pretence.copies.clear()
            answers(engine, distinct)
            assert sorted(map(str, pretence.copies)) == sorted(
                map(str, [FIRST, SECOND] if spread else [FIRST])
            )


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["lm_head", "v_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["layers", "head", "embedding", "replaced"],
)
def test_adapters_follow_the_layers_of_each_accelerator(
    llama: Any, tokenizer: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    models = {None: Oracle(llama)._model, "red": make_adapter(llama, tmp_path, 2, **settings)}
    requests = [(ids, name) for ids in ids_of_lengths(9, 1, 23) for name in models]
    with Pretence():
        engine = HFEngine.from_model(spread_out(llama), tokenizer)
        engine.add_adapter("red", str(tmp_path))
        rows = answers(engine, requests)
        for (ids, name), row in zip(requests, rows, strict=True):
            assert (row.cpu() - alone(models[name], ids)).abs().max() <= 1e-5


@pytest.mark.parametrize("on_cpu", [False, True])
def test_rows_stay_on_the_accelerator_from_engine_and_cache(
    llama: Any, tokenizer: Any, *, on_cpu: bool
) -> None:
    oracle = Oracle(llama)

    def build() -> HFEngine:
        Pretence().__enter__()  # on the engine's thread, for as long as it lives
        return HFEngine.from_model(moved(llama, SECOND), tokenizer)

    sequences = ids_of_lengths(9, 1, 23)
    cache = OutputCache(100, move_to_cpu=on_cpu)
    with AsyncLM(build, output_cache=cache) as llm:
        with Pretence():
            for _ in range(2):
                rows = llm.batch_next_token_logprobs_sync(sequences)
                assert rows.device == SECOND
                assert oracle.largest_error(sequences, list(rows.cpu())) <= 1e-5
                rows.zero_()
            drawn = llm.sample_sync(sequences[0], 5, temperature=0)  # on this thread
        assert llm.statistics().cache_hits >= len(sequences)
    expected = list(sequences[0])
    for _ in range(5):
        expected.append(int(alone(oracle._model, expected).argmax()))
    assert drawn == expected[-5:]


def test_the_default_budget_fits_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {FIRST: 1000 * 64, SECOND: 10 * 64}
    monkeypatch.setattr(storage, "_available_bytes", free.__getitem__)
    layer = LayerShape(2, 8, 8, torch.bfloat16, FIRST)  # 64 bytes a token
    other = replace(layer, device=SECOND)
    assert default_budget_bytes([layer, layer]) == 1000 * 64
    assert default_budget_bytes([layer, layer, other]) == 10 * 3 * 64


def test_a_thousand_rows_over_a_large_vocabulary_are_one_pass_on_an_accelerator(
    llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second pass would read all weights again."""
    monkeypatch.setattr(engine_module, "free_memory_bytes", lambda _device: 2**36)
    with Pretence():
        there = HFEngine.from_model(moved(llama, FIRST), tokenizer)._served
    here = HFEngine.from_model(build_model("llama", **llama_settings()), tokenizer)._served
    assert there.max_rows * there.embedding_rows >= 1000 * 128_256
    assert here.max_rows * here.embedding_rows <= 2**26


def test_draws_of_a_batch_are_read_from_an_accelerator_once() -> None:
    rows = torch.randn(3, 600).log_softmax(-1)
    requests = [Draw(0.1), Draw(0.5, temperature=0.7), Draw(0.9, temperature=0.0)]
    with Pretence() as pretence:
        there = rows.to(FIRST)
        draws = Draw.compute(there, requests)
        assert pretence.reads == 1
    assert draws == Draw.compute(rows, requests)


@pytest.mark.parametrize("distinct", [1, 3, 7])
def test_masks_are_the_same_on_an_accelerator(distinct: int) -> None:
    generator = random.Random(3)
    masks: list[Mask | None] = [
        Mask(sorted(generator.sample(range(19), 5)), 19) for _ in range(distinct - 1)
    ]
    batch_masks = (
        [[*masks, None][number % distinct] for number in range(7)]
        if masks
        else [Mask([3], 19)] * 7
    )
    with Pretence() as pretence:
        factors = RowMasks(batch_masks, 7, 19).factors(0, 7, FIRST)
        assert pretence.copies == [FIRST] * (2 if 1 < distinct < 7 else 1)
    expected = RowMasks(batch_masks, 7, 19).factors(0, 7, torch.device("cpu"))
    assert factors.tolist() == expected.tolist()
