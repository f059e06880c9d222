"""Engines whose workers run in other processes, with the CPU build."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import genlm
from genlm.core.rows.reductions import TopK
from genlm_vllm.conformance import TinyLlama
from genlm_vllm.processes import VARIABLE, FailureLog, engine_died, record_failures
from genlm_vllm.worker import call_workers

from .traffic import finish, largest_error, prompts, rows, submit, unfetched


@pytest.fixture(scope="module")
def engine(tiny: TinyLlama) -> Iterator[Any]:
    """An engine with two tensor-parallel ranks and steps of 4 requests and 64 tokens."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_loras": 3}
    engine = tiny.engine(multiprocess=None, tensor_parallel_size=2, **options)
    for name, path in tiny.adapters.items():
        engine.add_adapter(name, path)
    yield engine
    engine.close()


def test_two_ranks_give_the_rows_of_one(engine: Any, tiny: Any) -> None:
    sequences = prompts(200, 3, 65, 33, 1, 90, 90)
    for name in (None, "red", "blue"):
        assert largest_error(tiny, rows(engine, sequences, name), sequences, name) <= 1e-4
    assert engine.statistics()["processes"] == "own"


def test_interrupts_do_not_end_the_workers(engine: Any, tiny: Any) -> None:
    workers = [handle.proc for handle in engine.llm_engine.model_executor.workers]
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
    sequences = prompts(20, 5)
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4
    assert [worker.exitcode for worker in workers] == [None, None]


def test_rows_belong_to_the_caller(engine: Any, tiny: Any) -> None:
    first, *others = prompts(90, 5, 33, 12, 70, 8)
    [row] = rows(engine, [first])
    before = row.clone()
    assert largest_error(tiny, rows(engine, others), others) <= 1e-4
    assert torch.equal(row, before), "a row changed with the next step"


def test_rows_of_aborted_requests_do_not_gather(engine: Any) -> None:
    for seed in range(5):
        query = submit(engine, prompts(250, seed=seed)[0])
        engine.step()
        engine.abort(query.query_id)
    engine.step()
    assert unfetched(engine) == 0


def test_two_ranks_reduce_and_score_as_one(
    engine: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = set()

    def recorded(vllm: Any, method: str, *arguments: Any) -> list[Any]:
        replies = call_workers(vllm, method, *arguments)
        if method == "genlm_collect":
            answering.update(rank for rank, reply in enumerate(replies) if reply[0])
        return replies

    monkeypatch.setattr("genlm_vllm.workers.call_workers", recorded)
    sequences = prompts(90, 5, 130, 65)
    for name in (None, "blue"):
        queries = [submit(engine, ids, name, outputs=(TopK(3), None)) for ids in sequences]
        queries += [submit(engine, ids[:-1], name, targets=ids[2:]) for ids in sequences]
        results = finish(engine, queries)
        for ids, reduced, scores in zip(sequences, results, results[4:], strict=False):
            top, row = reduced.values
            assert largest_error(tiny, [row], [ids], name) <= 1e-4
            assert torch.equal(top.logprobs, row.topk(3).values)
            for place in (2, len(ids) // 2 + 1, len(ids) - 1):
                expected = tiny.logprobs(ids[:place], name)[ids[place]]
                assert abs(float(scores.logprobs[place - 2] - expected)) <= 1e-4
    assert answering == {0}


def test_aborted_rows_are_dropped_by_the_worker(engine: Any, tiny: Any) -> None:
    sequences = prompts(250, 40, 200, 7)
    for _ in range(3):
        queries = [submit(engine, ids) for ids in sequences]
        for query in queries[:2]:
            engine.abort(query.query_id)
        assert largest_error(tiny, finish(engine, queries[2:]), sequences[2:]) <= 1e-4
    rows(engine, sequences[:1])
    engine.step()
    assert unfetched(engine) == 0


def test_two_ranks_compute_populations(engine: Any, tiny: Any) -> None:
    generator = np.random.default_rng(0)
    before = engine.statistics()
    with genlm.AsyncLM(
        lambda: _UnclosedEngine(engine), output_cache=genlm.OutputCache(0)
    ) as llm:
        llm.load_lora(tiny.adapters["red"], "third")
        for adapter, name in ((None, None), ("red", "third")):
            population = llm.population(prompts(40)[0], 7, lora_name=name)
            for step in range(6):  # four places
                parents = generator.integers(0, 7, 7) if step % 2 else np.arange(7)
                population = population[parents].extend(generator.integers(3, 60, 7))
                drawn = population.draw_sync(seed=step)
                results = population.next_token_logprobs_sync()
                ids = [tuple(context.token_ids) for context in population]
                assert largest_error(tiny, results, ids, adapter) <= 1e-4
                logprobs = results.gather(1, drawn.token_ids[:, None])[:, 0]
                assert float((logprobs - drawn.logprobs).abs().max()) <= 1e-4
        with pytest.raises(genlm.PopulationError, match="cannot be sent"):
            population.reduce_sync(_HasFunction())
    engine.remove_adapter("third")
    assert engine.statistics()["members_forked"] > before["members_forked"]


class _HasFunction(genlm.GroupReduction):
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.function = lambda: 1

    def compute(self, rows: Any, row_of: Any, members: Any) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(len(members)),)


class _UnclosedEngine:
    """An engine whose `close` has no effect."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


def test_bad_adapters_neither_end_the_engine_nor_mix_up_its_answers(
    engine: Any, tiny: Any, tmp_path: Any
) -> None:
    with pytest.raises(genlm.AdapterError, match="is not a folder"):
        engine.add_adapter("bad", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 64, "lora_alpha": 8, "target_modules": ["q_proj"]}'
    )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(genlm.AdapterError, match="weights cannot be read"):
        engine.add_adapter("bad", str(tmp_path))
    weights = Path(tiny.adapters["red"]) / "adapter_model.safetensors"
    shutil.copy(weights, tmp_path)
    with pytest.raises(genlm.AdapterError, match="rank 64 is greater than"):
        engine.add_adapter("bad", str(tmp_path))  # refused by the workers
    sequences = prompts(9, 4)
    assert largest_error(tiny, rows(engine, sequences, "red"), sequences, "red") <= 1e-4
    assert largest_error(tiny, rows(engine, sequences), sequences) <= 1e-4


def test_rows_come_from_the_last_stage_of_a_pipeline(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering: set[int] = set()

    def recorded(engine: Any, method: str, *arguments: Any) -> list[Any]:
        replies = call_workers(engine, method, *arguments)
        if method == "genlm_collect":
            answering.update(rank for rank, reply in enumerate(replies) if reply[0])
        return replies

    monkeypatch.setattr("genlm_vllm.workers.call_workers", recorded)
    options = {"pipeline_parallel_size": 2, "enforce_eager": False}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = tiny.engine(multiprocess=None, lora=False, **options)
    try:
        sequences = prompts(200, 3, 65, 33, 1, 90, 90)
        results = rows(engine, sequences)
        [scores] = finish(
            engine, [submit(engine, sequences[0][:-1], targets=sequences[0][90:])]
        )
        for place in (90, 128, 199):
            expected = tiny.logprobs(sequences[0][:place])[sequences[0][place]]
            assert abs(float(scores.logprobs[place - 90] - expected)) <= 1e-4
        assert largest_error(tiny, results, sequences) <= 1e-4
        assert answering == {1}
        assert engine.statistics()["contexts"] == "not kept: pipelines"
    finally:
        engine.close()


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders for sockets of the engines that the test loads."""
    created: list[Path] = []

    class Recorded(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> str:
            created.append(Path(self.name))
            return super().__enter__()

    monkeypatch.setattr("genlm_vllm.engine.TemporaryDirectory", Recorded)
    return created


def test_closed_workers_leave_no_files(tiny: Any, folders: list[Path]) -> None:
    engine = tiny.engine(multiprocess=None, lora=False, tensor_parallel_size=2)
    executor = engine.llm_engine.model_executor
    init_method, _ = call_workers(engine.llm_engine, "genlm_init_method")
    file = Path(init_method.removeprefix("file://"))
    workers = [handle.proc.pid for handle in executor.workers]
    memory = {
        Path(mapped.path)
        for worker in workers
        for mapped in psutil.Process(worker).memory_maps()
        if file.name in mapped.path and mapped.path.startswith("/dev/shm/")
    }
    [sockets] = folders
    try:
        assert file.is_file()
        assert len(memory) == 2  # of two ranks
        assert any(path.is_socket() for path in sockets.iterdir())
    finally:
        engine.close()
    assert not [path for path in (file, sockets, *memory) if path.exists()]
    assert not executor._finalizer.alive  # it would refer to the executor and its pipes


def test_a_failed_load_leaves_no_processes_threads_and_files(
    tiny: Any, folders: list[Path]
) -> None:
    process, states = psutil.Process(), []
    for _ in range(2):  # the first one starts `multiprocessing`
        with pytest.raises(genlm.ModelLoadError, match="KV cache"):
            tiny.engine(multiprocess=True, kv_cache_memory_bytes=10)
        gc.collect()
        children = process.children(recursive=True)
        states.append((children, process.num_fds(), set(threading.enumerate())))
    assert states[0] == states[1]
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)


PROGRAM = """
import logging
import os
import sys
import psutil
from genlm_vllm.engine import VLLMEngine

if __name__ == "__main__":
    options = dict(enforce_eager=True, kv_cache_memory_bytes=2**24)
    VLLMEngine({model!r}, engine_opts=options).close()
    engine = VLLMEngine({model!r}, engine_opts=options, multiprocess=True)
    print(engine._failures.first())
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    sys.stdin.read()
else:  # a worker imports this program first, and vLLM after this package
    import vllm.logger
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    print("checked:", hasattr(ALL_ATTENTION_FUNCTIONS["vllm"], "__wrapped__"), flush=True)
    vllm.logger._configure_vllm_root_logger()
    log = logging.getLogger("vllm.v1.test")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("failed")

    class Late:
        def __del__(self, create_file=os.mknod):
            create_file({finalized!r})

    late = Late()
"""


@pytest.mark.parametrize(
    ("exit_codes", "ends"),
    [
        ([0], "failed (worker 0 ended with exit status 0); see"),
        (
            [None, -9, 3],
            "failed (worker 1 was ended by SIGKILL, worker 2 ended with exit status 3)",
        ),
        ([-42], "failed (worker 0 was ended by signal 42)"),
        ([None], "failed; vLLM raised ValueError: no reply. Load"),
    ],
)
def test_the_error_says_how_workers_ended(exit_codes: list[int | None], ends: str) -> None:
    handles = [SimpleNamespace(proc=SimpleNamespace(exitcode=code)) for code in exit_codes]
    executor = SimpleNamespace(workers=[*handles, SimpleNamespace()])  # the last one is Ray's
    with contextlib.closing(FailureLog()) as failures:
        error = engine_died(
            SimpleNamespace(model_executor=executor), failures, ValueError("no reply")
        )
    assert f"a worker of vLLM {ends}" in str(error)


def test_a_worker_that_is_killed_while_it_starts_is_reported(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # also of the worker
    with pytest.raises(genlm.ModelLoadError, match=r"\(worker 0 was ended by SIGKILL\)"):
        tiny.engine(multiprocess=True, lora=False, worker_cls="killed_worker.KilledWorker")


def test_a_worker_that_is_killed_between_steps_is_reported_by_each_call(tiny: Any) -> None:
    others = set(threading.enumerate())
    engine = tiny.engine(multiprocess=True, lora=False)
    try:
        [prompt] = prompts(9)
        rows(engine, [prompt])
        [handle] = engine.llm_engine.model_executor.workers
        [monitor] = (
            thread
            for thread in set(threading.enumerate()) - others
            if thread.name == "MultiprocWorkerMonitor"
        )
        handle.proc.kill()
        monitor.join()  # vLLM has closed its queues
        submit(engine, (*prompt, 5))  # its token is sent before vLLM's step
        for call in (engine.step, lambda: submit(engine, prompt)):
            with pytest.raises(genlm.EngineDiedError, match=r"worker 0 was ended by SIGKILL"):
                call()
    finally:
        engine.close()


@pytest.fixture
def program(tiny: Any, tmp_path: Path) -> Iterator[Any]:
    """A program with an engine in its process and one with a worker, its output and its log."""
    script, log = tmp_path / "program.py", tmp_path / "log"
    finalized = str(tmp_path / "finalized")
    script.write_text(PROGRAM.format(model=str(tiny.path), finalized=finalized))
    variables = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_LOGGING")}
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as files, log.open("w") as stderr:
        options |= {"env": variables | {"TMPDIR": files}}  # sockets need a short path
        command = [sys.executable, "-W", "ignore", script]
        with subprocess.Popen(command, stderr=stderr, text=True, **options) as client:
            assert client.stdout is not None
            output = [client.stdout.readline().strip() for _ in range(3)]
            yield SimpleNamespace(
                client=client, output=output, log=log, files=Path(files), finalized=finalized
            )
            client.kill()


def test_a_program_with_a_spawned_worker(program: Any) -> None:
    """One program for four properties, because it takes half a minute."""
    checked, failure, children = program.output
    assert checked == "checked: True", program.log.read_text()
    assert failure == "ZeroDivisionError: division by zero"
    # Torch and, before it configures its log, vLLM warn on a CPU.
    expected = re.compile(r"\[?W\d|Triton is installed, but")
    lines = program.log.read_text().splitlines()
    assert not [line for line in lines if not expected.match(line)]
    processes = [psutil.Process(int(pid)) for pid in children.split()]
    assert len(processes) >= 2  # a worker and a tracker of resources
    program.client.kill()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert not Path(program.finalized).exists(), "a worker has finalised its interpreter"
    assert not [file for file in program.files.iterdir() if file.name.startswith("genlm")]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Function that records the exceptions of vLLM's log in a file, as in vLLM's processes."""
    factory = logging.getLogRecordFactory()

    def record(path: str) -> None:
        monkeypatch.setenv(VARIABLE, path)
        assert record_failures()

    yield record
    recorder: Any = logging.getLogRecordFactory()
    logging.setLogRecordFactory(factory)
    os.close(recorder._file)


def log_exception(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("vllm.v1").exception("failed")


def test_a_log_that_cannot_be_written_hides_no_exception(recording: Any) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    recording("/dev/full")  # on which every write fails
    logger = logging.getLogger("vllm.v1")
    logger.addHandler(handler)
    try:
        log_exception("first")
    finally:
        logger.removeHandler(handler)
    [record] = logged
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "first"


def test_a_log_has_no_name_in_the_file_system_and_keeps_the_first_exception(
    recording: Any,
) -> None:
    log = FailureLog()
    try:
        assert log.first() is None
        recording(log.path)
        for text in ("first", "x" * 10**5, "last"):
            log_exception(text)
        assert log.first() == "ValueError: first"
        assert Path(log.path).stat().st_nlink == 0
        assert Path(log.path).stat().st_size < 2**14
    finally:
        log.close()
    assert log.first() is None
