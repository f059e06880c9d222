"""`SharedRows`: shared memory in which a worker of another process returns rows.

vLLM sends large results of workers through a socket. For rows over 128,000 ids a socket takes
2.5 times the CPU time of shared memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from genlm.plugin import PackedCompletions

__all__ = ["PackedResults", "SharedRows"]

Rows = np.ndarray[Any, np.dtype[np.float32]]


class SharedRows:
    """Memory of the process that loaded the model, to which one worker writes rows.

    The memory is an anonymous file, which the kernel frees even if the processes are killed. It
    keeps the size of the largest step until it is closed, because allocating memory takes
    longer than copying rows.

    Args:
        address: Address of the memory of another process; None for new memory.

    Attributes:
        address: The path of the file and its first bytes, which a worker compares: the same
            path may exist on another machine.

    Raises:
        OSError: The address is that of another machine.
    """

    def __init__(self, address: tuple[str, bytes] | None = None) -> None:
        flags = "r+b"
        if address is None:
            token = secrets.token_bytes(16)
            self._file = os.fdopen(os.memfd_create("genlm-vllm-rows"), flags, buffering=0)
            self._file.write(token)
            self.address = (f"/proc/{os.getpid()}/fd/{self._file.fileno()}", token)
        else:
            path, token = self.address = address
            self._file = Path(path).open(flags, buffering=0)  # noqa: SIM115 - see `close`
            if self._file.read(len(token)) != token:
                self.close()
                raise FileNotFoundError(f"{path} is a different file")
        self._values = np.empty(0, np.float32)

    def write(self, rows: Rows) -> None:
        """Write rows over the previous ones.

        Raises:
            OSError: Too little memory is free.
        """
        os.posix_fallocate(
            self._file.fileno(), 0, rows.nbytes
        )  # otherwise writing may be fatal
        self.read(rows.shape)[:] = rows

    def read(self, shape: tuple[int, ...]) -> Rows:
        """Return the written rows in this shape; the next `write` changes them."""
        size = int(np.prod(shape))
        if self._values.size < size:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(self._file.fileno(), self._values.itemsize * size, flags=flags)
            self._values = np.frombuffer(memory, np.float32)
        return self._values[:size].reshape(shape)

    def close(self) -> None:
        """Close the file; its memory is freed when both processes have closed it."""
        self._file.close()
        self._values = np.empty(0, np.float32)


class PackedResults(NamedTuple):
    """Results of a step from a worker of another process.

    Attributes:
        packed: The results; their rows are in the shared memory if `shape` is not None.
        shape: Shape of the rows in the `SharedRows`; None if there are none.
    """

    packed: PackedCompletions
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, packed: PackedCompletions, shared: SharedRows | None) -> PackedResults:
        """Move the rows of results to shared memory if there is enough of it."""
        if packed.rows is None or shared is None:
            return cls(packed, None)
        try:
            shared.write(packed.rows)
        except OSError:
            return cls(packed, None)
        return cls(packed._replace(rows=None), packed.rows.shape)

    def with_rows(self, shared: SharedRows) -> PackedCompletions:
        """Return the results with their rows, which the next step may change."""
        if self.shape is None:
            return self.packed
        return self.packed._replace(rows=shared.read(self.shape))
