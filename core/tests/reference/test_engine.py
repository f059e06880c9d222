"""The reference engine serves the model's rows, exactly, with and without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import run_code

from genlm.core.base.errors import AdapterError, ModelLoadError, UnknownAdapterError
from genlm.core.engine.engine import Capability, LoraEngine
from genlm.core.queries.query import Query
from genlm.core.reference.engine import ReferenceEngine

PROMPTS = [b"The ", b"T", bytes([7, 7]), b"zqx", b"and the old m", b"boat"]


def rows_of(
    engine: ReferenceEngine, requests: Sequence[tuple[Sequence[int], str | None]]
) -> list[torch.Tensor]:
    for index, (token_ids, adapter) in enumerate(requests):
        engine.submit(Query(index, tuple(token_ids), adapter))
    completions = {completion.query_id: completion for completion in engine.step()}
    errors = [completion.error for completion in completions.values() if completion.error]
    if errors:
        raise errors[0]
    rows = [completions[index].result for index in range(len(requests))]
    assert all(isinstance(row, torch.Tensor) for row in rows)
    return rows  # type: ignore[return-value]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "sailor"
    folder.mkdir()
    (folder / "text.txt").write_text("Ahoy! The sea is high.\n\nThe mast broke.\n")
    return folder


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_rows_are_the_logs_of_the_exact_rows(order: int) -> None:
    engine = ReferenceEngine(order=order)
    rows = rows_of(engine, [(prompt, None) for prompt in PROMPTS])
    for row, prompt in zip(rows, PROMPTS, strict=True):
        expected = np.log(engine.exact_row(prompt))
        assert row.dtype == torch.float32
        assert row.shape == (257,)
        # float32 keeps 24 bits, and no log-probability here is below -16.
        np.testing.assert_allclose(row.numpy(), expected, rtol=0, atol=16 * 2**-24)
        assert abs(row.double().logsumexp(0).item()) < 1e-6


def test_an_adapter_mixes_its_text_in_with_the_stated_weight(adapter: Path) -> None:
    engine = ReferenceEngine(text="The cat sat.", order=3, adapter_weight=0.25)
    engine.add_adapter("sailor", str(adapter))
    alone = ReferenceEngine(str(adapter / "text.txt"), order=3)
    for prompt in PROMPTS:
        mixed = 0.75 * engine.exact_row(prompt) + 0.25 * alone.exact_row(prompt)
        np.testing.assert_allclose(engine.exact_row(prompt, "sailor"), mixed, rtol=1e-14)
        row = rows_of(engine, [(prompt, "sailor")])[0]
        np.testing.assert_allclose(row.numpy(), np.log(mixed), rtol=0, atol=1e-6)


def test_one_batch_mixes_adapters_and_the_base(adapter: Path, tmp_path: Path) -> None:
    engine = ReferenceEngine()
    engine.add_adapter("sailor", str(adapter))
    (tmp_path / "text.txt").write_text("Zum Zoo, zum Zoo!")
    engine.add_adapter("zoo", str(tmp_path))
    requests = [(prompt, name) for name in ("sailor", None, "zoo") for prompt in PROMPTS]
    for row, (prompt, name) in zip(rows_of(engine, requests), requests, strict=True):
        expected = np.log(engine.exact_row(prompt, name))
        np.testing.assert_allclose(row.numpy(), expected, rtol=0, atol=1e-6)
    firsts = [engine.exact_row(PROMPTS[0], name) for name in ("sailor", None, "zoo")]
    assert not np.allclose(firsts[0], firsts[1])
    assert not np.allclose(firsts[1], firsts[2])


def test_only_the_query_with_an_unknown_adapter_fails(adapter: Path) -> None:
    engine = ReferenceEngine()
    engine.add_adapter("sailor", str(adapter))
    for index, name in enumerate([None, "pirate", "sailor"]):
        engine.submit(Query(index, (65,), name))
    errors = {completion.query_id: completion.error for completion in engine.step()}
    assert errors[0] is None
    assert errors[2] is None
    assert isinstance(errors[1], UnknownAdapterError)
    assert errors[1].loaded == ("sailor",)


def test_a_bad_adapter_is_refused_and_changes_nothing(adapter: Path, tmp_path: Path) -> None:
    engine = ReferenceEngine()
    engine.add_adapter("sailor", str(adapter))
    before = engine.exact_row(b"The", "sailor")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(AdapterError, match=r"text\.txt"):
        engine.add_adapter("empty", str(empty))
    (empty / "text.txt").write_text("\n \n\n")
    with pytest.raises(AdapterError, match="empty"):
        engine.add_adapter("empty", str(empty))
    with pytest.raises(AdapterError, match="'sailor' is loaded already"):
        engine.add_adapter("sailor", str(empty))
    np.testing.assert_array_equal(engine.exact_row(b"The", "sailor"), before)
    with pytest.raises(UnknownAdapterError):
        engine.exact_row(b"The", "empty")


def test_the_declared_capability_is_a_lora_engine() -> None:
    engine = ReferenceEngine(max_context=12)
    assert engine.capabilities == {Capability.LORA}
    assert isinstance(engine, LoraEngine)
    assert engine.max_context == 12
    assert ReferenceEngine().max_context is None


def test_the_figures_count_the_tokens_looked_at() -> None:
    engine = ReferenceEngine(text="some text", order=3)
    rows_of(engine, [(b"a", None), (b"abc", None), (b"abcdef", None)])
    assert engine.statistics()["tokens_computed"] == 1 + 2 + 2
    assert engine.statistics()["training_bytes"] == len("some text")


def test_a_path_trains_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xff\xfe\xff\xfe\n\nab")
    engine = ReferenceEngine(str(path), order=2)
    same = ReferenceEngine(text=b"\xff\xfe\xff\xfe\n\nab", order=2)
    np.testing.assert_array_equal(engine.exact_row(b"\xff"), same.exact_row(b"\xff"))
    assert engine.exact_row(b"\xff").argmax() == 0xFE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere/at.txt"}, "/nowhere/at.txt"),
        ({"text": " \n\n "}, "empty"),
        ({"order": 0}, "order 0"),
        ({"adapter_weight": 0.0}, "adapter_weight"),
        ({"adapter_weight": 1.5}, "adapter_weight"),
        ({"model": "a.txt", "text": "b"}, "pass one"),
        ({"model": "a\0b"}, "null byte"),
    ],
)
def test_a_model_that_cannot_be_made_says_why(options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ReferenceEngine(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "asked for the model 5; pass 'demo' or the path"),
        ({"order": None}, "order=None; expected an integer, 1 or more"),
        ({"order": 2.0}, "order=2.0; expected an integer"),
        ({"adapter_weight": "0.5"}, "adapter_weight='0.5'; expected a number"),
    ],
)
def test_an_option_of_another_type_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ReferenceEngine(**options)  # type: ignore[arg-type]


def test_importing_the_package_loads_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, genlm.core.reference.plugin; "
        "assert not {'numpy', 'torch'} & set(sys.modules), 'heavy import'"
    )
    run_code(code)
