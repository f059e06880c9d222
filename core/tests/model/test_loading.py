"""`load_model` hands options to whom they belong and leaves nothing behind when it fails."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import TIMEOUT_S, oracle_row

import genlm
from genlm.core.base.errors import ModelLoadError, UnknownBackendError
from genlm.core.model.lm import AsyncLM, load_model, load_model_by_name
from genlm.core.plugins.lookup import refresh
from genlm.core.rows.output_cache import OutputCache

BACKENDS = """
    from genlm import BackendSpec, ModelLoadError, TokenIdError, hookimpl
    from genlm.plugin import Reduced
    from scripted import ScriptedEngine

    class Strict(ScriptedEngine):
        def __init__(self, model, vocab_size=16, *, poison=()):
            super().__init__(vocab_size, poison=poison)
            self.model = model

        def statistics(self):
            return {"model": str(self.model), "batches": len(self.batches)}

    def tolerant(model, **options):
        engine = Strict(model)
        engine.statistics = lambda: dict(options)
        return engine

    def bare(model):
        return Strict(model)

    def forgetful(model):
        Strict(model)

    class Homely(Strict):
        option_homes = {"load_in_": "bits_opts", "device_map": "lib_opts", "": "lib_opts"}

        def __init__(
            self, model, device="cpu", lib_opts=None, bits_opts=None, quiet: bool = False
        ):
            super().__init__(model)

        @classmethod
        def from_model(cls, model, tokenizer, *, device="cpu"):
            engine = cls(model)
            engine.given = (model, tokenizer, device)
            return engine

    def failing(model, reason="no reason"):
        raise ModelLoadError(f"{model!r}: {reason}")

    def interrupted(model):
        raise KeyboardInterrupt

    class Faulty(Strict):
        built = []

        def __init__(self, model, fault):
            super().__init__(model)
            self.fault = fault
            self.built.append(self)

        def submit(self, query):
            if self.fault == "embeds 4 to 15" and query.token_ids[0] < 4:
                raise TokenIdError(query.token_ids[0], 0, 4)
            if self.fault == "embeds nothing":
                raise TokenIdError(query.token_ids[0], 0, 0)
            super().submit(query)

        def step(self):
            if self.fault == "interrupted":
                raise KeyboardInterrupt
            if self.fault == "returns nothing":
                return None
            completions = [] if self.fault == "silent" else super().step()
            if self.fault == "none but reduced rows":
                completions = [c._replace(result=Reduced((c.result,))) for c in completions]
            return completions

        def evaluate(self, queries):
            if self.fault == "kernel":
                raise RuntimeError("the kernel takes heads of 64")
            rows = super().evaluate(queries)
            return rows * float("nan") if self.fault == "overflow" else rows

    @hookimpl
    def genlm_backends():
        for name in "Strict tolerant bare forgetful failing interrupted Faulty Homely".split():
            yield BackendSpec(name.lower(), "engine", f"loading_backends:{name}")
"""
NAMES = (
    *("strict", "tolerant", "bare", "forgetful", "failing", "interrupted", "faulty"),
    "homely",
)


@pytest.fixture(autouse=True)
def backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that provides the engines above, installed as `pip` would have."""
    (tmp_path / "loading_backends.py").write_text(textwrap.dedent(BACKENDS))
    folder = tmp_path / "genlm_loading_backends-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: genlm-loading-backends\nVersion: 1.0\n"
    )
    entries = "".join(f"{name} = loading_backends\n" for name in NAMES)
    (folder / "entry_points.txt").write_text(f"[genlm]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    refresh()
    yield
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "loading_backends", raising=False)
    refresh()


def engine_threads() -> list[threading.Thread]:
    names = {f"genlm-{name}" for name in NAMES}
    return [thread for thread in threading.enumerate() if thread.name in names]


def assert_no_thread_is_left() -> None:
    for thread in engine_threads():
        thread.join(TIMEOUT_S)
    assert engine_threads() == []


# -- options --------------------------------------------------------------------------


def test_the_model_and_the_options_reach_the_engine() -> None:
    with load_model("a-model", "strict", vocab_size=9, poison=[5]) as llm:
        assert llm.name == "strict"
        assert llm.vocab_size == 9
        assert llm.statistics().engine["model"] == "a-model"
        assert torch.equal(llm.next_token_logprobs_sync([1]), oracle_row([1], None, 9))
        with pytest.raises(genlm.EvaluationError):
            llm.next_token_logprobs_sync([5])


def test_a_path_reaches_the_engine_as_it_is(tmp_path: Path) -> None:
    with load_model(tmp_path, backend="bare") as llm:
        assert llm.statistics().engine["model"] == str(tmp_path)


@pytest.mark.parametrize(
    "options", [{"sise": 3}, {"vocab_size": 9, "sise": 3}, {"model_": "x"}]
)
def test_an_unknown_option_is_an_error_that_lists_the_known_ones(
    options: dict[str, Any],
) -> None:
    wrong = next(name for name in options if name != "vocab_size")
    with pytest.raises(TypeError) as refused:
        load_model("a-model", "strict", **options)
    message = (
        f"backend 'strict' takes no option {wrong!r}. It takes: vocab_size, poison. "
        f"On any backend: output_cache, max_batch_size, max_pending, progress"
    )
    assert str(refused.value) == message
    assert_no_thread_is_left()


@pytest.mark.parametrize(
    ("written", "meant"), [("poisen", "poison"), ("max_pendng", "max_pending")]
)
def test_a_misspelt_option_is_recognised(written: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"Did you mean '{meant}'\?$"):
        load_model("a-model", "strict", **{written: 3})


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ({"device_map": "auto"}, "Pass lib_opts={'device_map': 'auto'}"),
        ({"load_in_8bit": True}, "Pass bits_opts={'load_in_8bit': True}"),
        (
            {"revision": "main"},
            "If it is an option of the engine's library, pass lib_opts={'revision': 'main'}",
        ),
        ({"cache_size": 1}, "Pass output_cache=genlm.OutputCache(...)"),
        ({"devise": "cpu"}, "Did you mean 'device'?"),
        ({"tokenizer": 1}, "tokenizer= is for model objects; a folder contains its tokenizer"),
    ],
)
def test_an_option_of_the_engines_library_is_sent_where_it_belongs(
    option: dict[str, Any], advice: str
) -> None:
    with pytest.raises(TypeError, match=rf"\. {re.escape(advice)}$"):
        load_model("a-model", "homely", **option)


def test_a_model_object_is_served_with_its_tokenizer() -> None:
    model, tokenizer = torch.nn.Linear(2, 2), object()
    with load_model(model, "homely", tokenizer=tokenizer, device="gpu") as llm:
        assert llm.engine.given == (model, tokenizer, "gpu")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="takes no option 'lib_opts'"):
        load_model(model, "homely", tokenizer=tokenizer, lib_opts={})


def test_a_model_object_needs_its_tokenizer_and_an_engine_that_takes_objects() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"'gpt2' is a name; .*from_pretrained\('gpt2'\)"):
        load_model(model, "homely", tokenizer="gpt2")
    with pytest.raises(
        TypeError, match=r"Linear, without its tokenizer: load_model\(model, 'ho"
    ):
        load_model(model, "homely")
    with pytest.raises(
        TypeError, match="'strict' cannot serve a model object, Linear; it loads mod"
    ):
        load_model(model, "strict", tokenizer=object())


def test_a_loaded_model_says_its_name(tmp_path: Path) -> None:
    for model, model_name in [("a-model", "a-model"), (tmp_path, str(tmp_path))]:
        with load_model(model, "strict") as llm:
            assert repr(llm).startswith(f"<AsyncLM {model_name!r} on 'strict': 16 token ids")
    with load_model(torch.nn.Linear(2, 2), "homely", tokenizer=object()) as llm:
        assert repr(llm).startswith("<AsyncLM 'Linear' on 'homely': ")


@pytest.mark.parametrize("value", ["false", 2, None, []])
def test_an_option_that_is_a_flag_is_true_or_false(value: object) -> None:
    with pytest.raises(TypeError, match=rf"quiet={re.escape(repr(value))}; expected True or"):
        load_model("a-model", "homely", quiet=value)
    load_model("a-model", "homely", quiet=True).close()


def test_all_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"no option 'b', 'a'\. It takes: none"):
        load_model("a-model", "bare", b=1, a=2)


def test_an_engine_that_takes_any_option_gets_any() -> None:
    with load_model("a-model", "tolerant", anything=3) as llm:
        assert llm.statistics().engine == {"anything": 3}


def test_the_output_cache_is_the_one_given() -> None:
    cache = OutputCache(1)
    with load_model("a-model", "bare", output_cache=cache) as llm:
        for token_id in (1, 2, 1):
            llm.next_token_logprobs_sync([token_id])
        assert len(cache) == 1
        assert llm.statistics().engine["batches"] == 1 + 3  # the first row, at load


def test_the_batch_size_is_bounded_as_asked() -> None:
    with load_model("a-model", "bare", max_batch_size=2) as llm:
        llm.batch_next_token_logprobs_sync([[i] for i in range(7)])
        assert llm.statistics().batch_sizes == {2: 3, 1: 1}


def test_a_full_batch_does_not_wait_for_more() -> None:
    with load_model("a-model", "bare", max_batch_size=2) as llm:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(llm.batch_next_token_logprobs_sync, [[1], [2]])
            assert answer.result(TIMEOUT_S).shape == (2, 16)
        assert llm.statistics().batch_sizes == {2: 1}


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_pending": 0}], ids=str)
def test_scheduler_options_reach_the_scheduler_which_refuses_wrong_ones(
    options: dict[str, Any],
) -> None:
    [name] = options
    with pytest.raises(ValueError, match=f"{name}={options[name]}; it must be"):
        load_model("a-model", "bare", **options)
    assert_no_thread_is_left()


# -- failures -------------------------------------------------------------------------


def test_what_the_engine_raises_reaches_the_caller_and_leaves_no_thread() -> None:
    with pytest.raises(ModelLoadError, match="'a-model': too large"):
        load_model("a-model", "failing", reason="too large")
    assert_no_thread_is_left()


def test_an_interrupted_construction_reaches_the_caller_and_leaves_no_thread() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_model("a-model", "interrupted")
    assert_no_thread_is_left()


def test_a_function_that_returns_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="returned None, which is not an engine"):
        load_model("a-model", "forgetful")
    assert_no_thread_is_left()


def test_a_wrong_value_reaches_the_caller_and_leaves_no_thread() -> None:
    with pytest.raises(TypeError):
        load_model("a-model", "strict", vocab_size="many")
    assert_no_thread_is_left()


def test_an_unknown_backend_is_the_registrys_error() -> None:
    with pytest.raises(UnknownBackendError, match="no engine named 'strickt'") as unknown:
        load_model("a-model", "strickt")
    assert "strict" in unknown.value.installed
    assert_no_thread_is_left()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("kernel", "RuntimeError: the kernel takes heads of 64"),
        ("overflow", "NaN at 16 of 16 ids"),
        ("silent", "10000 steps of the engine returned no Completion with query_id -1"),
        ("returns nothing", "EvaluationError: the engine's step returned NoneType; expected a"),
        ("embeds nothing", "embeds none of the tokenizer's ids"),
    ],
)
def test_a_model_whose_first_row_fails_is_refused_and_its_engine_closed(
    fault: str, reason: str
) -> None:
    with pytest.raises(
        ModelLoadError, match=f"'faulty' has loaded the model 'a-model'.*{reason}"
    ) as refused:
        load_model("a-model", "faulty", fault=fault)
    assert refused.value.__cause__ is not None
    assert last_built().closed
    assert_no_thread_is_left()


def test_an_interrupted_first_row_reaches_the_caller_and_closes_the_engine() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_model("a-model", "faulty", fault="interrupted")
    assert last_built().closed
    assert_no_thread_is_left()


def test_the_first_row_is_of_a_token_that_the_model_embeds() -> None:
    with load_model("a-model", "faulty", fault="embeds 4 to 15") as llm:
        assert last_built().batches == [[(4, 4, 4)]]
        assert llm.statistics().requests == 0


def test_the_first_row_may_be_a_reduced_result() -> None:
    with load_model("a-model", "faulty", fault="none but reduced rows") as llm:
        row = llm.next_token_logprobs_sync([5])
    assert torch.equal(row, oracle_row([5], None, 16))


def last_built() -> Any:
    return importlib.import_module("loading_backends").Faulty.built[-1]


# -- choice and names -----------------------------------------------------------------


def test_the_backend_in_use_is_the_default() -> None:
    with genlm.use_backend("bare"), load_model("a-model") as llm:
        assert llm.name == "bare"


def test_a_backend_may_be_named_in_full() -> None:
    with load_model("a-model", "genlm-loading-backends:bare") as llm:
        assert llm.name == "bare"


def test_the_engine_lives_on_a_thread_with_its_name() -> None:
    with load_model("a-model", "bare"):
        assert [thread.name for thread in engine_threads()] == ["genlm-bare"]
    assert_no_thread_is_left()


def test_from_name_and_the_old_name_are_load_model() -> None:
    assert load_model_by_name is load_model
    with AsyncLM.from_name("a-model", "strict", vocab_size=9, max_batch_size=1) as llm:
        assert llm.vocab_size == 9
        llm.batch_next_token_logprobs_sync([[1], [2]])
        assert llm.statistics().batch_sizes == {1: 2}
