"""CUDA streams without a GPU: which operation may run before which.

Tensors of the CPU pose as tensors of a GPU, and the streams of `torch.cuda` are replaced by
ones that compute at once but keep vector clocks. An operation that reads a tensor on a stream
which is not ordered after the one that wrote it, or whose memory another stream may meanwhile
give away, is a hazard. On a GPU nothing would raise: the result would be another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["RecordedStreams"]

_DEVICE, _HOST = torch.device("cuda", 0), torch.device("cpu")
_Clock = dict["_Stream", int]


class _Stream:
    """A stream, and the number of operations of every stream after which it is."""

    def __init__(self) -> None:
        self.clock: _Clock = {}

    def wait_event(self, event: _Event) -> None:
        self._join(event.clock)

    def wait_stream(self, other: _Stream) -> None:
        self._join(other.clock)

    def _join(self, clock: _Clock) -> None:
        for stream, count in clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)


class _Event:
    """What a stream had computed when it was recorded."""

    def __init__(self, streams: RecordedStreams) -> None:
        self._streams = streams
        self.clock: _Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = dict((stream or self._streams.current).clock)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)


class _Memory:
    """A tensor's memory: the operation that wrote it last, and who is known to read it."""

    def __init__(self, allocator: _Stream) -> None:
        self.writer, self.count = allocator, 0
        self.known_to = {allocator}


class RecordedStreams(TorchFunctionMode):
    """The mode in which tensors given to `on_device`, and what is computed of them, pose.

    Args:
        monkeypatch: Replaces the streams of `torch.cuda`.

    Attributes:
        default: The device's default stream.
        current: The stream on which operations run now.
        hazards: Names of the operations that were not ordered.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.default = self.current = _Stream()
        self.hazards: list[str] = []
        self._memory: dict[int, _Memory] = {}
        self._alive: list[torch.Tensor] = []  # so that no address is used twice
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda _device=None: self.default)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.Tensor, "record_stream", self._record_stream)
        pickled = torch.Tensor.__reduce_ex__

        def reduce(tensor: torch.Tensor, protocol: int) -> Any:
            assert not self.is_on_device(tensor), "it would be loaded on the device"
            return pickled(tensor, protocol)

        monkeypatch.setattr(torch.Tensor, "__reduce_ex__", reduce)

    @contextmanager
    def on(self, stream: _Stream | None = None) -> Iterator[_Stream]:
        """Run on a stream; on a new one by default."""
        before, self.current = self.current, stream or _Stream()
        try:
            yield self.current
        finally:
            self.current = before

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a tensor pose as one that the current stream has computed."""
        self._write([tensor])
        return tensor

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor poses."""
        return _address(tensor) in self._memory

    @property
    def _record_stream(self) -> Any:
        # A function, which the class makes a method.
        return lambda tensor, stream: self._memory[_address(tensor)].known_to.add(stream)

    def _write(self, tensors: list[torch.Tensor]) -> None:
        clock = self.current.clock
        clock[self.current] = clock.get(self.current, 0) + 1
        for tensor in tensors:
            memory = self._memory.get(_address(tensor))
            if memory is None:
                self._alive.append(tensor)
                memory = self._memory[_address(tensor)] = _Memory(self.current)
            memory.writer, memory.count = self.current, clock[self.current]

    def _read(self, name: str, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            memory = self._memory[_address(tensor)]
            if not _address(tensor):  # of all tensors without values
                continue
            if self.current.clock.get(memory.writer, 0) < memory.count:
                self.hazards.append(f"{name} before what it reads")
            if self.current not in memory.known_to and name != "cpu":  # the host waits for it
                self.hazards.append(f"{name} of memory that may be used again")

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the CPU and note its order."""
        options = dict(kwargs or {})
        posing = [
            each
            for each in tree_leaves((args, options))
            if isinstance(each, torch.Tensor) and self.is_on_device(each)
        ]
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            if posing and func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
                return _DEVICE
            if posing and func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return True
            return func(*args, **options)
        if posing and name == "numpy":
            raise TypeError("an array of a tensor that is on a device")
        moved = any(each is _DEVICE for each in tree_leaves((args, options)))
        args, options = tree_map(lambda x: _HOST if x is _DEVICE else x, (args, options))
        if name == "to" and moved and posing:
            return args[0]  # already there
        result = func(*args, **options)
        if name in _FREE:
            return result
        self._read(name, posing)
        if name == "cpu" or (name == "to" and isinstance(args[1], torch.device)):
            result = result.clone()
            if not moved:
                return result
        seen = {_address(each) for each in posing}
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            made: list[Any] = [args[0]]
        elif options.get("out") is not None:
            made = tree_leaves(options["out"])
        else:
            made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            made = [each for each in made if _address(each) not in seen]
        if posing or moved:
            self._write(made)
        return result


_FREE = frozenset({"size", "dim", "numel", "untyped_storage", "__len__", "element_size"})
"""Functions that read no values."""


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()
