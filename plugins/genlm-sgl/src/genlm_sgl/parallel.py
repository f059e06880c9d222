"""Tensor parallelism: `ParallelModel`, whose further ranks are child processes.

Rank 0 is in the calling process and determines every pass. Each other rank has its part of the
weights and of the KV cache in a process of its own, and runs the same passes::

    rank 0, the engine's thread                 rank 1, 2, ...: run_rank
    ParallelModel                               ServedModel
      write_slots  ----- slots ------------->     write_slots
      run_pass     ----- tokens, slots ----->     run_pass
          |       <---- SGLang's collectives -->     |
       logits      <---- finished, or error --     logits, which are dropped
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, NoReturn

import torch

from genlm import EngineDiedError
from genlm.plugin import EvaluationError, describe_error
from genlm_sgl.corrections import ModelCorrections
from genlm_sgl.loading import read_text_config
from genlm_sgl.model_runner import LoadWeightsHook, RunnerConfig, configure, server_options
from genlm_sgl.process_state import QuietLogger, quiet
from genlm_sgl.served_model import ServedModel

_GRACE_S = 30.0
"""Seconds after which ranks of which one has raised an error are taken to be out of step."""

_ENDED = pickle.dumps(None)
"""Message to a rank that has raised an error: rank 0 has ended the method as well."""

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from genlm_sgl.parallel import run_rank
run_rank({descriptor}, {rank})
"""


class _Command(NamedTuple):
    """A method that a rank calls.

    Attributes:
        method: Name of the method.
        arguments: Its arguments.
        named: Its named arguments.
        is_call: Whether the rank replies.
    """

    method: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    is_call: bool


class _Reply(NamedTuple):
    """The reply of a rank: the result of a method, or its error."""

    result: Any
    error: str | None = None


class _Link(NamedTuple):
    """A rank's process and the connection to it."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection


class RankProcesses:
    """The processes of all ranks but rank 0.

    Args:
        size: Number of ranks.
        cpu: Whether SGLang computes on the CPU.

    Raises:
        EngineDiedError: A process ended while it imported SGLang.
    """

    def __init__(self, size: int, *, cpu: bool) -> None:
        self._failure: str | None = None
        self._links = [_start(rank) for rank in range(1, size)]
        try:
            self.run("import_sglang", torch.get_num_threads(), cpu=cpu)
        except BaseException:
            self.close()
            raise

    def post(self, method: str, *arguments: Any, **named: Any) -> None:
        """Make all ranks call a method that raises no error.

        Raises:
            EngineDiedError: A process has ended.
        """
        self.send(_Command(method, arguments, named, is_call=False))

    def run(self, method: str, *arguments: Any, **named: Any) -> None:
        """Make all ranks call a method, which rank 0 does not call.

        Raises:
            EvaluationError: A rank raised an error.
            EngineDiedError: A process has ended.
        """
        with self.call(method, *arguments, **named):
            pass

    @contextlib.contextmanager
    def call(self, method: str, *arguments: Any, **named: Any) -> Iterator[list[Any]]:
        """Make all ranks call a method while the body calls it for rank 0.

        Yields:
            An empty list, which receives the results of the ranks after the body.

        Raises:
            EvaluationError: A rank raised an error. The ranks may be used further.
            EngineDiedError: A process has ended, or the ranks are out of step.
        """
        self.send(_Command(method, arguments, named, is_call=True))
        results: list[Any] = []
        try:
            yield results
        except BaseException:
            # The other ranks raise the same error, or have finished. If rank 0 raised before
            # an operation of all ranks, they wait for it.
            self._receive(_GRACE_S)
            raise
        replies = self._receive(None)
        for link, reply in zip(self._links, replies, strict=True):
            if reply.error is not None:
                raise EvaluationError(f"rank {link.rank} of SGLang raised {reply.error}")
        results += [reply.result for reply in replies]

    def send(self, message: Any) -> None:
        """Send a command, or data for the method that runs, to all ranks.

        Raises:
            EngineDiedError: A process has ended.
        """
        if self._failure is not None:
            raise EngineDiedError(self._failure)
        # Plain pickles, because `Connection.send` passes tensors by torch's shared memory.
        data = pickle.dumps(message)
        for link in self._links:
            try:
                link.connection.send_bytes(data)
            except OSError:
                self._fail(link)

    def _receive(self, timeout_s: float | None) -> list[_Reply]:
        """Return the reply of each rank.

        Raises:
            EngineDiedError: A process has ended, or has not replied in this time.
        """
        replies: list[_Reply] = []
        for link in self._links:
            reply = _Reply(None)
            try:
                if not link.connection.poll(timeout_s):
                    self._fail(link)
                reply = pickle.loads(link.connection.recv_bytes())  # noqa: S301 - our own process
                if reply.error is not None:
                    link.connection.send_bytes(_ENDED)
            except (EOFError, OSError):
                self._fail(link, reply.error)
            replies.append(reply)
        return replies

    def _fail(self, link: _Link, error: str | None = None) -> NoReturn:
        """Kill the processes, because one has ended or does not reply.

        Args:
            link: The rank.
            error: The error that the rank raised before.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(1.0)
        code = link.process.poll()
        state = "does not reply" if code is None else f"ended with exit code {code}"
        raised = "" if error is None else f" after it raised {error}"
        self._failure = f"rank {link.rank} of SGLang {state}{raised}; load the model again"
        for other in self._links:
            other.process.kill()
        raise EngineDiedError(self._failure)

    def close(self) -> None:
        """End the processes."""
        for link in self._links:
            link.connection.close()
        for link in self._links:
            try:
                link.process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                link.process.kill()
                link.process.wait()


def _start(rank: int) -> _Link:
    connection, remote = Pipe()
    with remote:
        program = _PROGRAM.format(path=sys.path, descriptor=remote.fileno(), rank=rank)
        process = subprocess.Popen(  # noqa: S603 - no shell
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=[remote.fileno()],
        )
    return _Link(rank, process, connection)


class ParallelModel(ServedModel):
    """Rank 0 of a model whose other ranks run in child processes.

    Args:
        config: The published settings.
        on_load_weights: Called when the model is built, before its weights are loaded.
        options: The arguments of `ServerArgs` of which they are made.
        gpu_id: Index of the GPU of rank 0.

    Raises:
        ModelLoadError: See `ServedModel`.
        EvaluationError: Another rank raised an error.
        EngineDiedError: A process has ended.
    """

    def __init__(
        self,
        config: RunnerConfig,
        on_load_weights: LoadWeightsHook,
        options: Mapping[str, Any],
        gpu_id: int,
    ) -> None:
        cpu = config.arguments.device == "cpu"
        self._ranks = RankProcesses(config.arguments.tp_size, cpu=cpu)
        try:
            # The ranks wait for each other without end when they create process groups, so
            # errors before are found in a call of their own.
            self._ranks.run("configure", {**options, "nccl_port": config.port}, gpu_id)
            with self._ranks.call("build"):
                super().__init__(config, on_load_weights)
        except BaseException:
            self._ranks.close()
            raise

    def write_slots(self, slots: Any, count: int, begin: int) -> None:
        """Write slots to the tables of all ranks."""
        self._ranks.post("write_slots", slots, count, begin)
        super().write_slots(slots, count, begin)

    def run_pass(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Run a pass on all ranks and return the logits."""
        with self._ranks.call("run_pass", *arguments, **named):
            return super().run_pass(*arguments, **named)

    def read_hidden_states(self) -> None:
        """Make all ranks compute logits from any of the hidden states of a pass."""
        with self._ranks.call("read_hidden_states"):
            super().read_hidden_states()

    def vectors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the vectors of all ranks."""
        with self._ranks.call("vectors") as others:
            own = super().vectors()
        return [
            (
                name,
                torch.cat([tensor.flatten(), *(other[place][1].flatten() for other in others)]),
            )
            for place, (name, tensor) in enumerate(own)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the weights of all ranks."""
        tensors = list(weights)
        with self._ranks.call("load_weights"):
            for name, tensor in tensors:
                self._ranks.send((name, tensor.detach().cpu()))
            self._ranks.send(None)
            super().load_weights(tensors)

    def load_adapter(self, adapter_id: str, name: str, folder: str) -> str | None:
        """Load a LoRA adapter into all ranks; return the reason of a failure."""
        with self._ranks.call("load_adapter", adapter_id, name, folder) as reasons:
            reason = super().load_adapter(adapter_id, name, folder)
        return next(filter(None, [reason, *reasons]), None)

    def unload_adapter(self, adapter_id: str, name: str) -> str | None:
        """Unload a LoRA adapter from all ranks; return the reason of a failure."""
        with self._ranks.call("unload_adapter", adapter_id, name) as reasons:
            reason = super().unload_adapter(adapter_id, name)
        return next(filter(None, [reason, *reasons]), None)

    def close(self) -> None:
        """Free the model and end the processes of the other ranks."""
        try:
            super().close()
        finally:
            self._ranks.close()


class _Rank:
    """A rank in its process: the methods that rank 0 calls, besides those of the model.

    Args:
        rank: The rank.
        messages: Messages of rank 0.
    """

    def __init__(self, rank: int, messages: queue.SimpleQueue[Any]) -> None:
        self._rank, self._messages = rank, messages
        self._imports = contextlib.ExitStack()  # open until the process ends
        self._config: RunnerConfig
        self._corrections: ModelCorrections
        self._served: ServedModel

    def run(self, command: _Command) -> Any:
        """Call a method of this object or of the model."""
        owner = self if hasattr(type(self), command.method) else self._served
        return getattr(owner, command.method)(*command.arguments, **command.named)

    def import_sglang(self, threads: int, *, cpu: bool) -> None:
        """Import SGLang, with stubs on a CPU."""
        torch.set_num_threads(threads)
        QuietLogger("sglang")
        self._imports.enter_context(quiet())
        if cpu:
            from genlm_sgl.cpu.stubs import stub_packages

            self._imports.enter_context(stub_packages())
        server_options()

    def configure(self, options: Mapping[str, Any], gpu_id: int) -> None:
        """Publish SGLang's settings and read the config of the model."""
        self._config = configure(options, self._rank, gpu_id)
        config = read_text_config(options["model_path"], options)
        self._corrections = ModelCorrections(config, options)

    def build(self) -> None:
        """Build the model at the same time as all other ranks."""
        self._served = ServedModel(self._config, self._corrections.on_load_weights)

    def run_pass(self, *arguments: Any, **named: Any) -> None:
        """Run a pass and drop the logits, which rank 0 has as well."""
        self._served.run_pass(*arguments, **named)

    def load_weights(self) -> None:
        """Replace the weights by those that rank 0 sends, up to None."""
        self._served.load_weights(list(iter(self._messages.get, None)))


def run_rank(descriptor: int, rank: int) -> NoReturn:
    """Run the commands of rank 0 until it closes the connection, and end this process.

    Args:
        descriptor: File descriptor of the connection.
        rank: The rank of this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    try:
        _serve(connection, messages, rank)
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
    os._exit(1)


def _receive(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Receive the messages of rank 0; end this process when the connection is closed.

    A separate thread receives them, because a rank whose peers have ended may wait for them in
    a pass without end.
    """
    try:
        while True:
            messages.put(pickle.loads(connection.recv_bytes()))  # noqa: S301 - from rank 0
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        os._exit(1)


def _serve(connection: Connection, messages: queue.SimpleQueue[Any], rank: int) -> NoReturn:
    served = _Rank(rank, messages)
    while True:
        command = messages.get()
        try:
            reply = _Reply(served.run(command))
        except Exception as error:
            if not command.is_call:
                raise
            reply = _Reply(None, describe_error(error))
        if command.is_call:
            connection.send_bytes(pickle.dumps(reply))
        if reply.error is not None:
            try:
                messages.get(timeout=_GRACE_S)
            except queue.Empty:
                raise EngineDiedError(f"rank 0 did not end {command.method}") from None
