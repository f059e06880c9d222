"""Rows of GGUF files against transformers: families, quantised weights, adapters, scores."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import genlm
from genlm import AsyncLM, OutputCache
from genlm.testing import TINY_LLAMA, TinyModel
from genlm_llamacpp import checkpoint
from genlm_llamacpp.checkpoint import write_model
from genlm_llamacpp.engine import LlamaCppEngine

from .conftest import rows_of

EXACT = ("llama", "qwen2", "qwen3", "mamba")
GELU = ("gemma2", "gpt2")
"""Families with GELU, which llama.cpp looks up in a table of float16 values on the CPU."""


def sequences(seed: int = 0) -> list[list[int]]:
    """Sequences that share beginnings, one of them longer than a window and a batch."""
    generator = random.Random(seed)
    trunk = [generator.randrange(300) for _ in range(50)]
    branches = [[*trunk[:cut], 7 + cut, 9] for cut in (0, 1, 20, 49)]
    return [trunk, trunk[:1], trunk[:21], *branches, trunk[:30]]


def largest_error(engine, model, requested) -> float:
    rows = rows_of(engine, requested).double()
    expected = torch.stack([model.logprobs(ids) for ids in requested])
    return float((rows - expected).abs().max())


@pytest.mark.parametrize("family", EXACT)
def test_float32_rows_are_those_of_transformers(make, family):
    model = make(family)
    engine = model.engine(n_batch=32, n_ubatch=16)
    try:
        assert largest_error(engine, model, sequences()) < 1e-4
        assert largest_error(engine, model, [[*ids, 11] for ids in sequences()]) < 1e-4
    finally:
        engine.close()


class GeluTable:
    """A model whose GELU rounds input and output to float16, as llama.cpp's table does.

    Args:
        model: One of transformers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = copy.deepcopy(model)
        for module in self._model.modules():
            if type(module).__name__ in {"GELUTanh", "NewGELUActivation"}:
                module.register_forward_pre_hook(lambda _, inputs: (self._rounded(inputs[0]),))
                module.register_forward_hook(lambda _, inputs, output: self._rounded(output))

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return the row after a sequence, and set `is_close`.

        `is_close`: a value was so close to the middle between two float16 numbers that the
        same sum in another order may round to the other one.
        """
        self.is_close = False
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, -1, :300]
        return logits.double().log_softmax(-1)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        rounded = values.half().float()
        spacing = torch.exp2(torch.floor(torch.log2(rounded.abs().clamp_min(2**-14))) - 10)
        margin = spacing / 2 - (values - rounded).abs()
        self.is_close |= bool(((margin < 3e-7) & (spacing > 1e-4)).any())
        return rounded


@pytest.mark.parametrize("family", GELU)
def test_rows_of_gelu_models_are_those_of_a_table_of_float16(make, family):
    model = make(family)
    table = GeluTable(model._model_of(None))
    generator = random.Random(0)
    certain: list[list[int]] = []
    for _ in range(150):
        table.logprobs(ids := [generator.randrange(300), generator.randrange(300)])
        if not table.is_close:
            certain.append(ids)
    assert len(certain) >= 8
    engine = model.engine()
    try:
        assert largest_error(engine, table, certain[:32]) < 1e-4
        longer = [largest_error(engine, table, [ids]) for ids in sequences()]
        assert sorted(longer)[len(longer) // 2] < 1e-4
        assert largest_error(engine, model, sequences()) < 4e-3
    finally:
        engine.close()


@pytest.mark.parametrize("weights", ["Q8_0", "Q5_1", "Q4_0"])
def test_quantised_rows_are_those_of_the_dequantised_weights(make, tmp_path, weights):
    """llama.cpp's kernels also round what they multiply by to 8 bits, in blocks of 32."""
    model = make("qwen2", weights)
    folder = tmp_path / "dequantised"
    dequantised(model.path, model.file, folder)
    expected = transformers_rows(folder, sequences())
    engine = model.engine()
    try:
        found = rows_of(engine, sequences())
    finally:
        engine.close()
    error = (found[:, :300].log_softmax(-1) - expected).abs()
    assert float(error.max()) < 0.25
    assert float(error.mean()) < 0.03
    # Beside the weights before they were quantised it is no better than the rounding of them.
    assert float(
        (found - torch.stack([model.logprobs(i) for i in sequences()])).abs().mean()
    ) > (float(error.mean()))


def dequantised(folder: Path, file: Path, target: Path) -> None:
    """Copy a checkpoint with the weights that a GGUF file has."""
    shutil.copytree(folder, target)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    found = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file).tensors
    }
    own = load_file(folder / "model.safetensors")
    changed = {
        key: found[names.get_name(key, try_suffixes=(".weight", ".bias"))].reshape(value.shape)
        for key, value in own.items()
    }
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("weights", ["Q4_K", "Q6_K"])
def test_k_quantised_rows_are_those_of_the_dequantised_weights(tmp_path, weights):
    """Random blocks stand for quantised matrices: only llama.cpp itself quantises to these."""
    wide = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = TinyModel(tmp_path / "model", wide, model_type="qwen2")
    kind = gguf.GGMLQuantizationType[weights]
    block = gguf.GGML_QUANT_SIZES[kind][1]
    generator = np.random.default_rng(0)

    def quantise(array, _):
        size = array.size // 256
        blocks = generator.integers(0, 256, (size, block), np.uint8)
        half = {"Q4_K": [(0, 2e-4), (2, 1.5e-3)], "Q6_K": [(208, 3e-5)]}[weights]
        for place, scale in half:
            blocks[:, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
        return blocks.reshape(len(array), -1)

    file = tmp_path / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "quantize", quantise)
        patch.setattr(checkpoint, "_file_type", lambda _: "MOSTLY_Q4_K_M")
        write_model(model.path, file, weights=weights)
    dequantised(model.path, file, tmp_path / "dequantised")
    expected = transformers_rows(tmp_path / "dequantised", sequences())
    with AsyncLM(lambda: LlamaCppEngine(file, n_ctx=1024, threads=1)) as lm:
        found = lm.batch_next_token_logprobs_sync(sequences())
    error = (found[:, :300].log_softmax(-1) - expected).abs()
    assert float(error.max()) < 0.25
    assert float(error.mean()) < 0.03


def transformers_rows(folder: Path, requested: list[list[int]]) -> torch.Tensor:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [loaded.eval()(torch.tensor([ids])).logits[0, -1, :300] for ids in requested]
    return torch.stack(logits).double().log_softmax(-1)


def test_scores_take_one_pass_and_are_those_of_rows(llama):
    text = sequences()[0]
    with AsyncLM(llama.engine, output_cache=OutputCache(0)) as lm:
        scores = lm.score_sync(text, 3)
        figures = lm.statistics().engine
    expected = [float(llama.logprobs(text[:i])[text[i]]) for i in range(3, len(text))]
    torch.testing.assert_close(
        scores.double(), torch.tensor(expected).double(), atol=1e-4, rtol=0
    )
    assert figures["tokens_computed"] == len(text) - 1


def test_tokens_that_sequences_share_are_computed_once(llama):
    trunk = sequences()[0][:40]
    requested = [[*trunk, last] for last in range(20)]
    with AsyncLM(llama.engine, output_cache=OutputCache(0)) as lm:
        lm.batch_next_token_logprobs_sync(requested)
        first = lm.statistics().engine["tokens_computed"]
        lm.batch_next_token_logprobs_sync([[*ids, 5] for ids in requested])
        then = lm.statistics().engine["tokens_computed"]
    assert first == len(trunk) + len(requested)
    assert then == first + len(requested)


def test_the_contexts_of_a_recurrent_model_are_continued_where_they_end(make):
    model = make("mamba")
    trunk = sequences()[0][:40]
    with AsyncLM(model.engine, output_cache=OutputCache(0)) as lm:
        lm.next_token_logprobs_sync(trunk)
        rows = lm.batch_next_token_logprobs_sync([[*trunk, last] for last in range(8)])
        computed = lm.statistics().engine["tokens_computed"]
    assert computed == len(trunk) + 8
    for last, row in enumerate(rows):
        expected = model.logprobs([*trunk, last])
        torch.testing.assert_close(row.double(), expected, atol=1e-4, rtol=0)


def test_split_files_are_one_model(llama, tmp_path):
    write_model(llama.path, tmp_path / "model.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 1
    with genlm.load_model(tmp_path, "llamacpp", n_ctx=256, threads=1) as lm:
        row = lm.next_token_logprobs_sync([5, 6, 7]).double()
    torch.testing.assert_close(row, llama.logprobs([5, 6, 7]), atol=1e-4, rtol=0)
    parts[-1].unlink()
    with pytest.raises(genlm.ModelLoadError, match="could not read"):
        genlm.load_model(parts[0], "llamacpp", n_ctx=256, threads=1)
