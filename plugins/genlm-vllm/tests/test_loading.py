"""Options: accepted options, refused options, and defaults."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import genlm
from genlm_vllm.engine import VLLMEngine
from genlm_vllm.loading import (
    CPU_BLOCK_SIZE,
    _unsupported,
    checked_options,
    engine_arguments,
    needs_processes,
)


def test_options_that_would_make_rows_wrong_are_refused(tiny: Any) -> None:
    for name, value in {
        "logits_processors": ["a:B"],
        "worker_extension_cls": "a.B",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "spec_method": "ngram",
        "spec_tokens": 1,
        "enable_batch_sharded_sampling": True,
        "prefill_context_parallel_size": 2,
        "skip_tokenizer_init": True,
        "tokens_only": True,
        "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        "enable_prompt_embeds": True,
        "runner": "pooling",
        "convert": "embed",
        "data_parallel_size": 2,
        "nnodes": 2,
    }.items():
        with pytest.raises(ValueError, match=f"{name}.*leave it out"):
            VLLMEngine(tiny.path, engine_opts={name: value})


def test_adapters_in_float32_are_refused_on_a_gpu() -> None:
    gpu = SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: True,
        device_name="cuda",
        ray_device_key="GPU",
    )
    for dtype in ("float32", torch.float32):
        problem = _unsupported({"enable_lora": True, "dtype": dtype}, gpu)
        assert problem is not None
        assert "Pass dtype='bfloat16'" in problem
    assert _unsupported({"enable_lora": True, "dtype": "bfloat16"}, gpu) is None
    assert _unsupported({"dtype": "float32"}, gpu) is None


def test_values_without_an_effect_are_not_refused() -> None:
    options = {"enable_batch_sharded_sampling": False, "speculative_config": None}
    options |= {"data_parallel_size": 1, "prefill_context_parallel_size": 1, "nnodes": 1}
    options |= {"runner": "generate", "convert": "none", "kv_cache_dtype": "fp8"}
    assert engine_arguments("m", options).items() >= options.items()


def test_unknown_options_are_refused_with_a_hint(tiny: Any) -> None:
    with pytest.raises(TypeError, match=r"no option 'max_num_seq'\. Did you mean 'max_num"):
        VLLMEngine(tiny.path, engine_opts={"max_num_seq": 3})
    with pytest.raises(TypeError, match=r"'model'.*load_model's first argument"):
        VLLMEngine(tiny.path, engine_opts={"model": "other"})
    with pytest.raises(
        TypeError, match=r"'max_num_seqs'.* pass engine_opts=\{'max_num_seqs': 3"
    ):
        genlm.load_model(tiny.path, "vllm", max_num_seqs=3)


def test_dtypes_are_spelled_as_vllm_does() -> None:
    assert checked_options({"dtype": "bf16", "seed": 3}) == {"dtype": "bfloat16", "seed": 3}
    with pytest.raises(ValueError, match="no dtype 'float33'"):
        checked_options({"dtype": "float33"})


def test_options_of_other_types_are_refused(tiny: Any) -> None:
    for wrong in (["max_num_seqs"], "max_num_seqs", 3):
        with pytest.raises(TypeError, match=r"^engine_opts=.*; expected a mapping"):
            VLLMEngine(tiny.path, engine_opts=wrong)
    with pytest.raises(TypeError, match=r"'tensor_parallel_size'.*expected an integer"):
        VLLMEngine(tiny.path, engine_opts={"tensor_parallel_size": "2"})
    with pytest.raises(TypeError, match="multiprocess='yes'; expected True"):
        VLLMEngine(tiny.path, multiprocess="yes")


def test_a_model_that_vllm_cannot_serve_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(genlm.ModelLoadError, match="no such folder"):
        VLLMEngine("./nowhere")
    with pytest.raises(genlm.ModelLoadError, match=f"{tmp_path}.* it raised"):
        VLLMEngine(str(tmp_path))


def test_several_workers_need_processes(tiny: Any) -> None:
    assert needs_processes({"tensor_parallel_size": 2})
    assert needs_processes({"pipeline_parallel_size": 3})
    assert needs_processes({"distributed_executor_backend": "ray"})
    assert not needs_processes({"tensor_parallel_size": 1, "max_num_seqs": 4})
    with pytest.raises(ValueError, match="multiprocess=False contradicts"):
        VLLMEngine(tiny.path, engine_opts={"tensor_parallel_size": 2}, multiprocess=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed_executor_backend": "ray"}, "Ray's workers on 'cpu'"),
        ({"distributed_executor_backend": "external_launcher"}, "of a launcher.*out"),
        ({"kv_cache_dtype": "bfloat16"}, "a CPU does not support: rows would be wrong.*fp8"),
        ({"kv_offloading_size": 0.01}, "from GPUs only"),
        ({"max_model_len": 1}, "max_model_len=1 has no room"),
        (
            {"enable_chunked_prefill": False, "max_num_scheduled_tokens": 20},
            "max_num_scheduled_tokens=20 is less than max_model_len=",
        ),
        ({"num_gpu_blocks_override": 1}, "one of which vLLM reserves"),
        ({"pipeline_parallel_size": 2, "enable_lora": True}, "with enable_lora, at the first"),
        ({"pipeline_parallel_size": 2, "enforce_eager": True}, "with enforce_eager, at the"),
    ],
)
def test_what_vllm_cannot_do_on_the_cpu_is_refused_with_its_reason(
    tiny: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(genlm.ModelLoadError, match=message):
        VLLMEngine(tiny.path, engine_opts=options)


def test_defaults_give_way_to_options() -> None:
    arguments = engine_arguments("m", {})
    assert arguments["dtype"] == "float32"
    assert arguments["enforce_eager"] is True
    assert arguments["block_size"] == CPU_BLOCK_SIZE
    assert 0 < arguments["kv_cache_memory_bytes"] <= 4 * 2**30
    assert "max_loras" not in arguments
    assert arguments["async_scheduling"] is False
    assert engine_arguments("m", {"async_scheduling": False})["async_scheduling"] is False
    options = {"dtype": "bfloat16", "enforce_eager": False, "block_size": 64}
    arguments = engine_arguments("m", options | {"gpu_memory_utilization": 0.2})
    assert arguments.items() >= options.items()
    assert "kv_cache_memory_bytes" not in arguments


def test_pipelines_are_traced_so_that_vllm_warms_them_up() -> None:
    arguments = engine_arguments("m", {"pipeline_parallel_size": 2})
    assert "enforce_eager" not in arguments
    assert arguments["compilation_config"] == {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}


def test_one_slot_for_adapters_stays_free_on_the_cpu() -> None:
    assert engine_arguments("m", {"enable_lora": True})["max_loras"] == 5
    arguments = engine_arguments("m", {"enable_lora": True, "max_loras": 1})
    assert arguments["max_loras"] == arguments["max_cpu_loras"] == 2
