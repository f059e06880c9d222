"""End to end: `genlm.load_model(..., backend="hf")`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import genlm
from genlm_hf.engine import HFEngine

from .test_adapters import make_adapter
from .tiny import alone, ids_of_lengths

SEQUENCES = ids_of_lengths(9, 1, 23, 4, 23)


@pytest.fixture
def lm(folder: Path) -> Iterator[genlm.AsyncLM]:
    with genlm.load_model(str(folder), backend="hf", device="cpu") as lm:
        yield lm


@pytest.fixture
def adapter(llama: Any, tmp_path: Path) -> tuple[str, Any]:
    return str(tmp_path / "red"), make_adapter(llama, tmp_path / "red", 3)


def test_concurrent_requests_equal_unbatched_forward_passes(lm: Any, llama: Any) -> None:
    async def request_rows() -> list[torch.Tensor]:
        return await asyncio.gather(*map(lm.next_token_logprobs, SEQUENCES))

    rows = asyncio.run(request_rows())
    for ids, row in zip(SEQUENCES, rows, strict=True):
        assert (row - alone(llama, ids)).abs().max() <= 1e-4


def test_a_model_object_is_served_with_its_tokenizer(folder: Path, llama: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with genlm.load_model(llama, "hf", tokenizer=tokenizer, self_test=False) as lm:
        row = lm.next_token_logprobs_sync(SEQUENCES[0])
    assert (row - alone(llama, SEQUENCES[0])).abs().max() <= 1e-4
    with pytest.raises(TypeError, match="LlamaForCausalLM, without its tokenizer"):
        genlm.load_model(llama, "hf")


@pytest.mark.parametrize(
    ("option", "home"),
    [
        ({"device_map": "auto"}, "hf_opts={'device_map': 'auto'}"),
        ({"load_in_8bit": True}, "bitsandbytes_opts={'load_in_8bit': True}"),
        ({"bnb_4bit_quant_type": "nf4"}, "bitsandbytes_opts={'bnb_4bit_quant_type': 'nf4'}"),
        ({"attn_implementation": "sdpa"}, "hf_opts={'attn_implementation': 'sdpa'}"),
        ({"torch_dtype": "bf16"}, "dtype='bf16'"),
    ],
)
def test_options_of_transformers_are_sent_where_they_belong(
    folder: Path, option: dict[str, Any], home: str
) -> None:
    with pytest.raises(TypeError, match=rf"(\.|library,) [Pp]ass {re.escape(home)}$"):
        genlm.load_model(folder, "hf", **option)


def test_one_gather_mixes_adapters_and_the_base_model(
    lm: Any, llama: Any, adapter: tuple[str, Any]
) -> None:
    path, adapted = adapter
    lm.load_lora(path, "red")

    async def request_rows() -> list[torch.Tensor]:
        return await asyncio.gather(
            *(
                lm.next_token_logprobs(ids, lora_name=name)
                for ids in SEQUENCES
                for name in (None, "red")
            )
        )

    rows = asyncio.run(request_rows())
    for ids, base_row, red_row in zip(SEQUENCES, rows[::2], rows[1::2], strict=True):
        assert (base_row - alone(llama, ids)).abs().max() <= 1e-4
        assert (red_row - alone(adapted, ids)).abs().max() <= 1e-4


def test_rows_of_a_model_with_an_adapter_are_never_stale(
    lm: Any, llama: Any, adapter: tuple[str, Any]
) -> None:
    path, adapted = adapter
    lm.load_lora(path, "red")
    ids = SEQUENCES[0]
    for _ in range(2):
        row = lm.with_lora("red").next_token_logprobs_sync(ids)
        assert (row - alone(adapted, ids)).abs().max() <= 1e-4
        row = lm.next_token_logprobs_sync(ids)
        assert (row - alone(llama, ids)).abs().max() <= 1e-4


def test_wrong_requests_fail_alone(lm: Any, llama: Any) -> None:
    async def request_rows() -> list[Any]:
        wrong: list[Any] = [[], [3] * 65, [300], [-1]]
        return await asyncio.gather(
            *map(lm.next_token_logprobs, [*wrong, SEQUENCES[0]]), return_exceptions=True
        )

    empty, long, beyond, negative, row = asyncio.run(request_rows())
    assert isinstance(empty, genlm.EmptySequenceError)
    assert isinstance(long, genlm.ContextLengthError)
    assert isinstance(beyond, genlm.TokenIdError)
    assert isinstance(negative, genlm.TokenIdError)
    assert (row - alone(llama, SEQUENCES[0])).abs().max() <= 1e-4


def test_objects_of_the_users_own_are_served(llama: Any, tokenizer: Any) -> None:
    with genlm.AsyncLM(lambda: HFEngine.from_model(llama, tokenizer), name="hf") as lm:
        row = lm.next_token_logprobs_sync(SEQUENCES[0])
        assert (row - alone(llama, SEQUENCES[0])).abs().max() <= 1e-4


def test_an_unknown_option_names_the_known_ones(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"devise.*bitsandbytes_opts"):
        genlm.load_model(str(folder), backend="hf", devise="cpu")


def test_statistics_outlive_the_engine() -> None:
    with genlm.load_model("demo", backend="hf") as llm:
        loaded = llm.statistics().engine["tokens_evaluated"]
        llm.next_token_logprobs_sync([5, 6, 7])
        open_figures = llm.statistics().engine
    assert llm.statistics().engine == open_figures
    assert open_figures["tokens_evaluated"] == loaded + 3
