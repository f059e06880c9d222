"""One engine per process at a time, and a process whose state is restored."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from programs import run_code

import genlm
from genlm_sgl.conformance import TinyLlama
from genlm_sgl.model_runner import free_port

from .driving import TOLERANCE, answers, largest_error, prompts_of


def test_a_second_engine_is_refused_and_the_first_goes_on(build: Any, tiny: TinyLlama) -> None:
    engine = build()
    with pytest.raises(
        genlm.ModelLoadError, match=r"second SGLang engine.*Close the first one"
    ):
        build()
    prompts = prompts_of(5, 9)
    assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE


def test_an_engine_whose_construction_is_interrupted_is_closed(
    build: Any, tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("genlm_sgl.engine.SGLEngine._compare_scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert not torch.distributed.is_initialized()
    monkeypatch.undo()
    prompts = prompts_of(5, 9)
    assert largest_error(tiny, prompts, answers(build(), prompts)) <= TOLERANCE


def test_engines_follow_one_another_and_leave_little_behind(
    build: Any, tiny: TinyLlama
) -> None:
    prompts = prompts_of(5, 9)
    process = psutil.Process()
    usages = []
    for _ in range(6):
        engine = build()
        assert largest_error(tiny, prompts, answers(engine, prompts)) <= TOLERANCE
        engine.close()
        gc.collect()
        names = {thread.name for thread in threading.enumerate()}
        memory = process.memory_info()
        # Without the pages of files, which depend on other processes.
        private_bytes = memory.rss - memory.shared
        usages.append((process.num_threads(), process.num_fds(), names, private_bytes))
    assert usages[-1][0] <= usages[1][0]
    assert usages[-1][1] - usages[1][1] <= 2 * 4  # measured: one file descriptor an engine
    assert usages[-1][2] <= usages[1][2]
    assert usages[-1][3] - usages[1][3] <= 4 * 20 * 2**20  # measured: 2 MB an engine


def test_an_engine_leaves_no_temporary_files(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    build().close()
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_built_leaves_room_for_the_next(
    build: Any, tiny: TinyLlama, tmp_path: Path
) -> None:
    from genlm_sgl.engine import SGLEngine

    options = {"device": "cpu", "max_total_tokens": 64}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for model, words in ((tmp_path, "it raised"), (tmp_path / "no", "no such folder")):
        with pytest.raises(genlm.ModelLoadError, match=words):
            SGLEngine(model, engine_opts=options)
    with pytest.raises(genlm.ModelLoadError):
        SGLEngine("genlm/no-such-model", engine_opts=options)
    with pytest.raises(genlm.ModelLoadError, match="NVTX functions not installed"):
        build(enable_layerwise_nvtx_marker=True)  # hooks, also of modules that models share
    prompts = prompts_of(5, 9)
    assert largest_error(tiny, prompts, answers(build(), prompts)) <= TOLERANCE


def test_the_process_is_left_as_it_was(build: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def state() -> list[Any]:
        return [
            dict(os.environ),
            random.getstate(),
            str(np.random.get_state()),
            torch.get_rng_state().tolist(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            list(logging.root.handlers),
            logging.root.level,
            sys.excepthook,
            "torchvision" in sys.modules,
        ]

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = state()
    level = logging.getLogger("sglang").level
    engine = build()
    assert state() == before
    answers(engine, prompts_of(5, 40))
    assert state() == before
    engine.close()
    assert state() == before
    assert logging.getLogger("sglang").level == level
    assert "".join(capfd.readouterr()) == ""


def test_importing_the_plugin_sets_nothing_and_imports_no_sglang() -> None:
    """Nor does importing the engine import the modules that only a CPU needs."""
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import genlm_sgl.plugin, genlm_sgl.engine, genlm_sgl.loading\n"
        "assert not [name for name in sys.modules if name.startswith('genlm_sgl.cpu')]\n"
        "import genlm_sgl.conformance\n"
        "assert dict(os.environ) == before\n"
        "assert 'sglang' not in sys.modules and 'sgl_kernel' not in sys.modules"
    )
    run_code(code)


def test_load_model_serves_it_as_any_other(tiny: TinyLlama) -> None:
    prompts = prompts_of(5, 9, 1)

    async def request_rows(lm: genlm.AsyncLM) -> list[torch.Tensor]:
        requests = [lm.next_token_logprobs(prompt) for prompt in prompts * 2]
        return list(await asyncio.gather(*requests))

    options = {"device": "cpu", "max_total_tokens": 4096}
    with genlm.load_model(tiny.path, "sgl", engine_opts=options, gpu_id=0) as lm:
        before = lm.statistics().engine
        rows = asyncio.run(request_rows(lm))
        assert largest_error(tiny, prompts * 2, rows) <= TOLERANCE
        figures = lm.statistics()
        # The core joins identical prompts.
        assert figures.engine["tokens_computed"] - before["tokens_computed"] == 15
        drawn = asyncio.run(lm.batch_sample(prompts, 4, seed=1))
        assert [len(tokens) for tokens in drawn] == [4, 4, 4]


def test_programs_with_the_same_seed_use_different_ports() -> None:
    ports = set()
    for _ in range(4):
        random.seed(0)
        ports.add(free_port())
        assert random.getstate() == random.Random(0).getstate()
    assert len(ports) > 1
