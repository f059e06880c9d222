"""Child processes of tensor-parallel ranks, and the messages to and from them.

Rank 0 sends the calls of methods. Each process makes them for its rank, one after the other,
and replies. In a pass of a model, the ranks wait for each other. Therefore, a rank that has
raised an error does not continue until rank 0 has ended the method as well.
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
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, NoReturn, TypeAlias

from genlm import EngineDiedError
from genlm.plugin import EvaluationError, describe_error

Messages: TypeAlias = "queue.SimpleQueue[Any]"

_GRACE_S = 30.0
"""Seconds after which ranks of which one has raised an error are taken to be out of step."""

_ENDED = pickle.dumps(None)
"""Message to a rank that has raised an error: rank 0 has ended the method as well."""

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from {module} import {function}
{function}({descriptor}, {rank})
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
        function: Function of a module that each process calls with the file descriptor of its
            connection and its rank, and that calls `serve_rank`.
    """

    def __init__(self, size: int, function: Callable[[int, int], NoReturn]) -> None:
        self._failure: str | None = None
        self._links = [_start(function, rank) for rank in range(1, size)]

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
        if error is None:  # a rank may wait for another one that has ended
            ended = (other for other in self._links if other.process.poll() is not None)
            link = next(ended, link)
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


def _start(function: Callable[[int, int], NoReturn], rank: int) -> _Link:
    connection, remote = Pipe()
    with remote:
        program = _PROGRAM.format(
            path=sys.path,
            module=function.__module__,
            function=function.__name__,
            descriptor=remote.fileno(),
            rank=rank,
        )
        process = subprocess.Popen(  # noqa: S603 - no shell
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=[remote.fileno()],
        )
    return _Link(rank, process, connection)


def serve_rank(descriptor: int, make_rank: Callable[[Messages], Any]) -> NoReturn:
    """Call the methods that rank 0 requests until it closes the connection; end this process.

    Args:
        descriptor: File descriptor of the connection.
        make_rank: Returns the object with the methods. Its argument receives the messages of
            rank 0, such as data for a method that runs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process
    connection = Connection(descriptor)
    messages: Messages = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()
    try:
        _serve(connection, messages, make_rank(messages))
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
    os._exit(1)


def _receive(connection: Connection, messages: Messages) -> None:
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


def _serve(connection: Connection, messages: Messages, rank: Any) -> NoReturn:
    while True:
        command = messages.get()
        try:
            method = getattr(rank, command.method)
            reply = _Reply(method(*command.arguments, **command.named))
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
