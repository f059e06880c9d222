"""Options that are refused before a model is loaded, and defaults."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil
import pytest

from genlm import MissingRequirementError, ModelLoadError
from genlm.engines import memory, versions
from genlm_sgl.loading import (
    checked_options,
    cpu_running_requests,
    cpu_token_capacity,
    environment,
    read_text_config,
    runs_on_cpu,
)
from genlm_sgl.versions import check_version


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that makes a version of SGLang the installed one."""

    def pretend(installed: str) -> None:
        monkeypatch.setattr(versions, "installed_versions", lambda _: {"sglang": installed})

    return pretend


@pytest.mark.parametrize("installed", ["0.5.23", "0.5.23.post2"])
def test_versions_in_the_range_are_accepted(
    install: Callable[[str], None], installed: str
) -> None:
    install(installed)
    assert check_version() == installed


@pytest.mark.parametrize(
    "installed", ["0.5.8.post1", "0.5.22", "0.4.10.post2", "0.5.24", "0.6.0", "1.0"]
)
def test_other_versions_are_refused_with_the_command_to_run(
    install: Callable[[str], None], installed: str
) -> None:
    install(installed)
    with pytest.raises(MissingRequirementError) as refused:
        check_version()
    assert f"sglang >=0.5.23,<0.5.24 (found sglang {installed})" in str(refused.value)
    assert "pip install 'sglang>=0.5.23,<0.5.24'" in str(refused.value)


def test_an_engine_after_an_import_without_the_environment_is_not_built(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("sglang.imported_before")
    module._is_cpu = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ModelLoadError, match=r"imported sglang\.imported_before.*CPU_ENGINE=1"):
        build()


def test_an_engine_on_another_version_is_not_built(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(versions, "installed_versions", lambda _: {"sglang": "0.6.0"})
        with pytest.raises(MissingRequirementError, match=r"found sglang 0\.6\.0"):
            build()
    build()


@pytest.mark.parametrize(
    "option", ["dp_size", "attn_dp_size", "pp_size", "ep_size", "attn_cp_size", "nnodes"]
)
def test_other_kinds_of_parallelism_are_refused(build: Any, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*only {option}=1; divide .* by tp_size"):
        build(**{option: 2})
    assert checked_options({option: 1}, frozenset({option})) == {option: 1}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("speculative_algorithm", "NGRAM"),
        ("dllm_algorithm", "LowConfidence"),
        ("disaggregation_mode", "prefill"),
        ("gated_launch_port", 29911),
        ("is_embedding", True),
        ("skip_tokenizer_init", True),
        ("enable_hierarchical_cache", True),
        ("page_size", 16),
    ],
)
def test_options_that_would_make_rows_wrong_are_refused(
    build: Any, option: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"{option}.*leave it out"):
        build(**{option: value})
    without: dict[str, Any] = {option: "null" if option == "disaggregation_mode" else None}
    assert checked_options(without, frozenset({option})) == without


def test_a_machine_with_any_accelerator_computes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_on_cpu({})
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)  # such as an XPU
    assert not runs_on_cpu({})
    assert runs_on_cpu({"device": "cpu"})


def test_a_device_that_torch_does_not_find_is_refused(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="'cuda' is not available; torch finds no"):
        build(device="cuda")


def test_a_cache_without_a_place_for_a_sequence_is_refused(build: Any) -> None:
    with pytest.raises(
        ModelLoadError, match=r"cannot compute a single sequence .*'max_total_tokens'"
    ):
        build(max_total_tokens=1)


def test_a_backend_that_does_not_compute_prompts_is_refused(build: Any) -> None:
    with pytest.raises(ModelLoadError, match="cannot compute a prompt of this model"):
        build(device="cpu", prefill_attention_backend="triton")


def test_ranks_do_not_meet_at_the_address_of_a_server() -> None:
    expected = {"host": "127.0.0.1"}
    assert checked_options({"host": "example.invalid"}, frozenset({"host"})) == expected


def test_every_rank_has_cores_of_its_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cores(ranks: int) -> str:
        return environment(cpu=True, options={"tp_size": ranks})["SGLANG_CPU_OMP_THREADS_BIND"]

    monkeypatch.setattr("psutil.Process.cpu_affinity", lambda _: [0, 1, 4, 5, 6])
    assert cores(2) == "0,1|4,5,6"
    assert cores(5) == "0|1|4|5|6"
    monkeypatch.setattr("psutil.Process.cpu_affinity", lambda _: [3])
    assert cores(2) == "3|3"
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0-15|16-31")
    assert cores(2) == "0-15|16-31"
    assert environment(cpu=True) == {"SGLANG_USE_CPU_ENGINE": "1"}


def test_variables_of_nccl_are_those_of_sglangs_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def values(**options: Any) -> list[str]:
        variables = environment(cpu=False, options={"tp_size": 2, **options})
        return [variables[name] for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")]

    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    assert values() == ["0", "0"]
    assert values(enable_nccl_nvls=True) == ["0", "1"]
    assert values(enable_symm_mem=True) == ["1", "1"]
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert values() == ["1", "0"]
    assert environment(cpu=False) == {}


def test_dtypes_are_spelled_as_sglang_does() -> None:
    supported = frozenset({"dtype"})
    assert checked_options({"dtype": "bf16"}, supported) == {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match="no dtype 'float33'"):
        checked_options({"dtype": "float33"}, supported)


@pytest.mark.parametrize("option", ["model_path", "base_gpu_id"])
def test_options_with_an_argument_of_their_own_are_refused(build: Any, option: str) -> None:
    with pytest.raises(ValueError, match="first argument"):
        build(**{option: "x"})


def test_adapters_are_not_loaded_by_options(build: Any) -> None:
    with pytest.raises(ValueError, match="load_lora"):
        build(enable_lora=True, lora_paths=["red=somewhere"])


def test_an_unknown_option_is_refused_with_its_like(build: Any) -> None:
    with pytest.raises(TypeError, match=r"Did you mean .*'page_size'"):
        build(page_sise=4)


@pytest.mark.parametrize("wrong", [["page_size"], "page_size", 4])
def test_options_that_are_no_mapping_are_refused(tiny: Any, wrong: Any) -> None:
    from genlm_sgl.engine import SGLEngine

    with pytest.raises(TypeError, match=r"^engine_opts=.*; expected a mapping"):
        SGLEngine(tiny.path, engine_opts=wrong)


@pytest.mark.parametrize(("wrong", "error"), [("1", TypeError), (-1, ValueError)])
def test_the_index_of_a_gpu_is_an_integer(tiny: Any, wrong: Any, error: Any) -> None:
    from genlm_sgl.engine import SGLEngine

    with pytest.raises(error, match=rf"^gpu_id={wrong!r}; .* 0 or more"):
        SGLEngine(tiny.path, gpu_id=wrong)


def test_a_model_whose_state_is_not_a_slot_for_each_token_is_refused(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().close()  # imports SGLang
    from sglang.srt.model_executor.model_runner import ModelRunner

    allocate = ModelRunner.alloc_memory_pool

    def with_states(runner: Any) -> None:
        allocate(runner)
        pool = type(runner.req_to_token_pool)
        runner.req_to_token_pool.__class__ = type("HybridReqToTokenPool", (pool,), {})

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "alloc_memory_pool", with_states)
        with pytest.raises(ModelLoadError, match=r"with recurrent layers.*use genlm-hf"):
            build()
    build()


def measuring(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(memory, "_free", lambda *_: memory._Bound(free_bytes, "a test"))


def bytes_per_token(tiny: Any) -> int:
    config = json.loads((tiny.path / "config.json").read_text())
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    return 2 * math.prod(config[name] for name in names) * 4


def test_the_kv_cache_on_a_cpu_takes_a_quarter_of_the_free_memory(
    build: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_bytes = bytes_per_token(tiny)
    for free_tokens, expected in ((8_000, 2_000), (2**30, 2**17), (2**12, 2**10)):
        measuring(monkeypatch, free_tokens * token_bytes)
        assert cpu_token_capacity(read_text_config(str(tiny.path), {}), {}) == expected
    measuring(monkeypatch, 8_000 * token_bytes)
    assert build(max_total_tokens=None).statistics()["kv_token_capacity"] == 2_000


def test_too_little_memory_is_an_error_that_says_what_to_do(
    build: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, 2**12 * bytes_per_token(tiny) - 1)
    with pytest.raises(ModelLoadError) as refused:
        build(max_total_tokens=None)
    assert str(refused.value).startswith("asked for a KV cache of the default size, 0.25 of")
    assert "choose a size with engine_opts['max_total_tokens']" in str(refused.value)
    assert build(max_total_tokens=64).max_context == 64


def test_as_many_requests_run_on_a_cpu_as_their_tables_are_small(
    build: Any, tiny: Any, tmp_path: Any
) -> None:
    config = read_text_config(str(tiny.path), {})
    assert cpu_running_requests(config, {}) == 1024  # 512 positions, 320 ids
    assert cpu_running_requests(config, {"context_length": 2**15}) == 512
    assert cpu_running_requests(config, {"context_length": 2**20}) == 64
    assert read_text_config(str(tmp_path), {}) is None  # SGLang raises the error
    assert cpu_running_requests(None, {}) == 64
    engine = build()
    assert engine._served.max_rows == 1024
    engine.close()
    assert build(max_running_requests=5)._served.max_rows == 5


def test_a_size_that_users_choose_stands_whatever_other_processes_take(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang measures free memory twice; the second measurement returns less."""
    system = psutil.virtual_memory()
    looks = []

    def less_and_less() -> Any:
        names = {frame.name for frame in traceback.extract_stack()}
        looks.append("measure_pre_model_load_memory" in names)
        return system._replace(total=2**34, available=2**34 if looks[-1] else 2**29)

    monkeypatch.setattr(psutil, "virtual_memory", less_and_less)
    engine = build(max_total_tokens=4096)
    assert engine.statistics()["kv_token_capacity"] == 4096
    engine.close()
    assert set(looks) == {True, False}
    with pytest.raises(ModelLoadError, match="no GPU memory for the KV cache"):
        build(max_total_tokens=4096, mem_fraction_static=0.8)
