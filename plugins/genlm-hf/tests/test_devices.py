"""Models spread over devices, as far as a CPU can show it.

The second of two devices is "meta", on which torch computes nothing, but refuses to store
keys under indices of another device, or to mask scores and join tensors across devices. So
keys, values, indices and masks are seen to meet only where they should. The numbers are those
of one device, which other tests compare.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from genlm import Capability, UnsupportedCapability, Vocabulary
from genlm_hf.engine import HFEngine
from genlm_hf.gathered.forward import GatheredForward, read_cache
from genlm_hf.kv import storage
from genlm_hf.kv.batch import Computing, TreeBatch
from genlm_hf.kv.storage import KVStorage, LayerShape, default_budget_bytes
from genlm_hf.kv.tree import PrefixTree
from genlm_hf.packed.forward import PackedForward
from genlm_hf.packed.layout import AttentionLayout, read_layout
from genlm_hf.tiers.tier import ServedModel

from .families import FAMILIES
from .population import Oracle
from .tiny import WIDTH, answers, build_model, ids_of_lengths

FIRST, SECOND = torch.device("cpu"), torch.device("meta")


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


@pytest.mark.parametrize("tier", ["packed", "gathered", "padded"])
@pytest.mark.parametrize("where", MAPS)
def test_a_device_map_changes_no_row(
    where: str, tier: str, folder: Path, tmp_path: Path, llama: Any
) -> None:
    options = {"device_map": MAPS[where], "offload_folder": str(tmp_path)}
    engine = HFEngine(folder, hf_opts=options, dtype="float32", tier=tier)
    oracle, sequences = Oracle(llama), ids_of_lengths(9, 1, 23)
    for step in (sequences, [[*ids, 5] for ids in sequences]):
        assert oracle.largest_error(step, answers(engine, step)) <= 1e-5


def test_a_model_with_offloaded_layers_takes_no_adapters(
    folder: Path, tmp_path: Path, llama: Any
) -> None:
    options = {"device_map": MAPS["half on disk"], "offload_folder": str(tmp_path)}
    engine = HFEngine(folder, hf_opts=options, dtype="float32")
    assert engine.capabilities == {Capability.PREFIX_CACHE}
    with pytest.raises(UnsupportedCapability, match="device_map offloads layers"):
        engine.add_adapter("red", str(tmp_path))
    sequences = ids_of_lengths(9, 1, 23)
    assert Oracle(llama).largest_error(sequences, answers(engine, sequences)) <= 1e-5


def spread_out(model: Any) -> Any:
    """Put all after the first of two layers on the second device, as accelerate would."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    add_hook_to_module(layers[0], AlignDevicesHook(FIRST))
    children = dict(model.base_model.named_children())
    norm = [child for name, child in children.items() if name.startswith(("norm", "ln"))][-1]
    for module in (layers[1], norm, model.get_output_embeddings()):
        add_hook_to_module(module.to(SECOND), AlignDevicesHook(SECOND))
    return model


def check_passes(computing: Computing, storage: KVStorage) -> None:
    """Run a prompt, a fork with rows and a run, and what is known already."""
    tree = PrefixTree(storage.capacity)
    prompt = tuple(range(3, 23))
    forks = [(*prompt, i) for i in range(5)]
    longer = [(*prompt, 7, *range(30, 42)), (*prompt[:4], 9, 8), prompt]
    for sequences in ([prompt], forks, longer, forks):
        slots = [tree.insert(None, ids) for ids in sequences]
        computed = computing.compute(TreeBatch(tree, None, sequences, slots), storage)
        tree.commit()
        assert computed.logits.shape == (len(sequences), WIDTH)
        assert computed.logits.device == SECOND
    devices = [{keys.device, values.device} for keys, values in storage._tensors]
    assert devices == [{FIRST}, {SECOND}]


@pytest.mark.parametrize("name", ["llama", "mistral with a short window", "granite_swa"])
def test_the_packed_pass_keeps_each_layer_on_its_device(name: str) -> None:
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    ids = torch.tensor([[3, 4, 5]])
    layers = dict(read_layout(model, lambda: model(ids, use_cache=False))._layers)
    for module, layer in layers.items():  # "meta" cannot show which mask it was given
        shape = replace(layer.shape, device=(FIRST, SECOND)[layer.index])
        layers[module] = replace(layer, shape=shape)
    computing = PackedForward(spread_out(model), AttentionLayout(model, layers), FIRST)
    check_passes(computing, KVStorage(computing.shapes, 100_000))


@pytest.mark.parametrize("name", ["llama", "gptj", "bloom"])
def test_the_gathered_pass_keeps_each_layer_on_its_device(name: str, tokenizer: Any) -> None:
    model_type, settings = FAMILIES[name]
    served = ServedModel(
        model=spread_out(build_model(model_type, **settings)),
        vocabulary=Vocabulary.from_tokenizer(tokenizer),
        device=FIRST,
        embedding_rows=WIDTH,
        pad_id=0,
        max_context=64,
        max_tokens=1000,
        max_rows=1000,
    )
    shapes = read_cache(served, 3)
    check_passes(GatheredForward(served, shapes), KVStorage(shapes, 100_000))


def test_masks_are_known_again_when_a_layer_gets_a_copy(tokenizer: Any) -> None:
    model_type, settings = FAMILIES["mistral with a short window"]
    model = build_model(model_type, **settings)

    def copy_mask(_: Any, args: Any, kwargs: Any) -> Any:  # as from one GPU to another
        if kwargs["attention_mask"] is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
        return args, kwargs

    model.model.layers[1].register_forward_pre_hook(copy_mask, with_kwargs=True)
    engine = HFEngine.from_model(model, tokenizer)
    assert engine.statistics()["tier"] == "packed"
    assert [layer.window for layer in engine._tier._computing._layout.layers] == [4, 4]


def test_the_default_budget_fits_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {FIRST: 1000 * 64, SECOND: 10 * 64}
    monkeypatch.setattr(storage, "_available_bytes", free.__getitem__)
    one = LayerShape(2, 8, 8, torch.bfloat16, FIRST)  # 64 bytes a token
    other = replace(one, device=SECOND)
    assert default_budget_bytes([one, one]) == 1000 * 64
    assert default_budget_bytes([one, one, other]) == 10 * 3 * 64
