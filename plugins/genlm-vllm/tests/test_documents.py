"""The programs of the README and of the page on the engine run."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import vllm
from documents import blocks, run

import genlm
from genlm_vllm.loading import needs_processes

from .traffic import largest_error

PAGE = "docs/vllm-engine.md"


def _for_a_tiny_model(program: str) -> str:
    """Reduce the size of the KV cache."""
    assert '"kv_cache_memory_bytes": 2**30' in program
    return program.replace("2**30", "2**24")


def test_the_readme_runs(tiny: Any) -> None:
    [program] = blocks("plugins/genlm-vllm/README.md")
    names: dict[str, Any] = {}
    exec(_for_a_tiny_model(program).replace("path/to/model", str(tiny.path)), names)
    assert largest_error(tiny, names["rows"], names["prompts"]) <= 1e-4
    assert len(names["drawn"]) <= 50
    assert names["llm"].vocabulary.eos_token_id not in names["drawn"]
    assert isinstance(names["text"], str)


def test_adapters_are_loaded_as_the_page_says(tiny: Any) -> None:
    program, _ = blocks(PAGE)
    source = _for_a_tiny_model(program).replace("owner/name", str(tiny.path))
    source = source.replace("path/to/adapter", tiny.adapters["red"])
    names = asyncio.run(run(source, {"genlm": genlm, "ids": [5, 6, 7]}))
    names["llm"].close()
    assert float((names["row"] - tiny.logprobs([5, 6, 7], "red")).abs().max()) <= 1e-4


def test_the_options_that_the_page_shows_ask_for_several_workers() -> None:
    option_names = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    _, program = blocks(PAGE)
    for statement in program.split("engine_opts = ")[1:]:
        options = eval(statement)
        assert needs_processes(options)
        assert options.keys() <= option_names
