"""Processes of tensor-parallel ranks: how models are corrected there, and how they end."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from genlm import EngineDiedError, ModelLoadError
from genlm.testing import Family, TinyModel, families
from genlm_sgl import rank_processes
from genlm_sgl.conformance import TinyLlama
from genlm_sgl.engine import SGLEngine
from genlm_sgl.served_model import ServedModel

from .driving import TOLERANCE, answers, prompts_of
from .particles import served
from .ranks import ENDED, PARALLEL, children


@pytest.mark.filterwarnings("ignore::genlm.UnverifiedModelWarning")
def test_all_ranks_are_corrected_and_have_all_biases(tmp_path: Path) -> None:
    name = "qwen2 with a window of 16"
    base = families()[name]
    settings = {**base.settings, "num_key_value_heads": 2, "num_attention_heads": 4}
    family = Family(name, base.model_type, settings, base.hidden_size, False)
    model = TinyModel.of(tmp_path, family)
    engine = SGLEngine(model.path, engine_opts={"device": "cpu", **PARALLEL})
    try:
        prompts = prompts_of(50, 17, 3)
        for prompt, row in zip(prompts, answers(engine, prompts), strict=True):
            assert float((row - model.logprobs(prompt)).abs().max()) <= TOLERANCE
    finally:
        engine.close()


# -- ends of processes ----------------------------------------------------------------


def test_a_rank_that_ends_during_a_pass_ends_the_engine(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tiny, **PARALLEL) as llm:
        [child] = children()
        run_pass = ServedModel.run_pass

        def kill_and_run(self: ServedModel, *arguments: Any, **named: Any) -> torch.Tensor:
            child.kill()
            return run_pass(self, *arguments, **named)

        monkeypatch.setattr(ServedModel, "run_pass", kill_and_run)
        for _ in range(2):
            with pytest.raises(EngineDiedError, match=ENDED):
                llm.batch_next_token_logprobs_sync(prompts_of(4, 30))
    assert not children()


def test_ranks_that_are_out_of_step_end(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("only here")

    with served(tiny, **PARALLEL) as llm:
        monkeypatch.setattr(rank_processes, "_GRACE_S", 1.0)
        monkeypatch.setattr(ServedModel, "run_pass", fail)
        for _ in range(2):
            with pytest.raises(EngineDiedError, match=r"rank 1 of SGLang does not reply; load"):
                llm.next_token_logprobs_sync(prompts_of(4)[0])
    assert not children()


_WAITING = """
import os, time
from genlm_sgl.rank_processes import serve_rank

class Rank:
    def __init__(self, rank):
        self.rank = rank

    def wait(self, ended):
        if self.rank == ended:
            os._exit(7)
        time.sleep(900)

def run(descriptor, rank):
    serve_rank(descriptor, lambda _: Rank(rank))
"""


@pytest.mark.parametrize("ended", [1, 2])
def test_the_rank_that_has_ended_is_named_if_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    (tmp_path / "waiting_rank.py").write_text(_WAITING)
    monkeypatch.syspath_prepend(str(tmp_path))
    ranks = rank_processes.RankProcesses(3, importlib.import_module("waiting_rank").run)
    monkeypatch.setattr(rank_processes, "_GRACE_S", 1.0)

    def wait() -> None:
        with ranks.call("wait", ended):
            ranks._links[ended - 1].process.wait()
            raise ValueError("as a collective operation whose peer has ended")

    with pytest.raises(
        EngineDiedError, match=f"rank {ended} of SGLang ended with exit code 7;"
    ):
        wait()
    ranks.close()
    assert not children()


def test_a_model_that_cannot_be_loaded_leaves_no_process(
    tiny: TinyLlama, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(tiny.path) / name).read_bytes())
    with pytest.raises(ModelLoadError, match="Cannot find any model weights"):
        SGLEngine(tmp_path, engine_opts={"device": "cpu", **PARALLEL})
    assert not children()


_KILLED = """
import os, signal, sys
import psutil
from genlm_sgl.engine import SGLEngine

options = {"device": "cpu", "tp_size": 2, "max_total_tokens": 64}
engine = SGLEngine(sys.argv[1], engine_opts=options)
print(*[child.pid for child in psutil.Process().children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_the_process_of_the_engine(tiny: TinyLlama) -> None:
    program = subprocess.run(
        [sys.executable, "-c", _KILLED, tiny.path],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert program.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in program.stdout.split()]
    assert len(pids) == 1
    while not all(has_ended(pid) for pid in pids):
        time.sleep(0.1)  # the test's time limit ends this loop


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # until it is reaped
    except psutil.NoSuchProcess:
        return True
