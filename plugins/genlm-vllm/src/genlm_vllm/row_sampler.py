"""`RowSampler`: takes the place of a model runner's sampler for the members of populations.

A member's request gets no token from vLLM: its logits are handed over, the sampler reports that
nothing was sampled, and the request has nothing to compute until the caller's token is written
where the runner keeps the tokens that it sampled. vLLM has two model runners, which keep them
in different places.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm_vllm.row_buffer import device_index

__all__ = ["Receive", "RowSampler", "sampler_of"]

Receive = Callable[[torch.Tensor, Sequence[str]], list[int]]
"""Takes the logits of a batch and the ids of its requests; returns the rows of members."""


def sampler_of(runner: Any, receive: Receive) -> RowSampler:
    """Return the sampler for a model runner, to be installed as its `sampler`."""
    second = hasattr(runner, "req_states")
    return (SecondRunnerSampler if second else FirstRunnerSampler)(runner, receive)


class RowSampler(abc.ABC):
    """Passes logits on and samples the other requests of a batch with vLLM's sampler.

    Args:
        runner: vLLM's model runner.
        receive: Callback for each batch.
    """

    def __init__(self, runner: Any, receive: Receive) -> None:
        self._runner = runner
        self._base = runner.sampler
        self._receive = receive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def install(self) -> None:
        """Have the runner call this sampler."""
        self._runner.sampler = self

    def remove(self) -> None:
        """Restore the runner's sampler."""
        self._runner.sampler = self._base

    def __call__(self, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Sample a batch, except for the members of populations."""
        names = self._names(*arguments)
        members = self._receive(logits, names)
        if not members:
            return self._base(logits, *arguments, **options)
        if len(members) == len(names):
            output = self._nothing(len(names), logits.device)
        else:
            output = self._base(logits, *arguments, **options)
        self._hide(output, members)
        return output

    @abc.abstractmethod
    def _names(self, *arguments: Any) -> Sequence[str]:
        """Return the ids of the batch's requests, in the order of the logits."""

    @abc.abstractmethod
    def _nothing(self, count: int, device: torch.device) -> Any:
        """Return vLLM's output for a batch without a sampled token."""

    @abc.abstractmethod
    def _hide(self, output: Any, rows: list[int]) -> None:
        """Have the runner drop the sampled tokens of some rows."""

    @abc.abstractmethod
    def feed(self, names: Sequence[str], token_ids: Sequence[int]) -> None:
        """Write a token for each request into the runner's sampled tokens."""

    def computed_ids(self, name: str, count: int) -> npt.NDArray[np.int32] | None:
        """Return the first tokens of a request as an array, or None.

        The runner copies an array faster than a list.
        """
        del name, count
        return None


class FirstRunnerSampler(RowSampler):
    """Sampler for vLLM's first model runner, which keeps the batch's tokens in main memory."""

    def _names(self, *_arguments: Any) -> Sequence[str]:
        names: Sequence[str] = self._runner.input_batch.req_ids
        return names

    def _nothing(self, count: int, device: torch.device) -> Any:
        from vllm.v1.outputs import SamplerOutput

        return SamplerOutput(torch.zeros(count, 1, dtype=torch.int32, device=device), None)

    def _hide(self, output: Any, rows: list[int]) -> None:
        del output
        self._runner.discard_request_mask.np[rows] = True  # rebuilt for each batch

    def feed(self, names: Sequence[str], token_ids: Sequence[int]) -> None:
        """Write a token for each request into the runner's sampled tokens."""
        input_batch, requests = self._runner.input_batch, self._runner.requests
        index = input_batch.req_id_to_index
        for name, token_id in zip(names, token_ids, strict=True):
            requests[name].output_token_ids.append(token_id)
        rows = [index.get(name, -1) for name in names]
        # A request that was not in the last batch is added to the next with all its tokens.
        present = [place for place, row in enumerate(rows) if row >= 0]
        at = [rows[place] for place in present]
        ends = input_batch.num_tokens_no_spec[at]
        input_batch.token_ids_cpu[at, ends] = [token_ids[place] for place in present]
        input_batch.is_token_ids[at, ends] = True
        input_batch.num_tokens_no_spec[at] = ends + 1

    def computed_ids(self, name: str, count: int) -> npt.NDArray[np.int32] | None:
        """Return the first tokens of a request as an array, or None."""
        input_batch = self._runner.input_batch
        row = input_batch.req_id_to_index.get(name)
        return None if row is None else input_batch.token_ids_cpu[row, :count]


class SecondRunnerSampler(RowSampler):
    """Sampler for vLLM's second model runner, which keeps the last token of each request."""

    def _names(self, *arguments: Any) -> Sequence[str]:
        names: Sequence[str] = arguments[0].req_ids
        return names

    def _nothing(self, count: int, device: torch.device) -> Any:
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        none = torch.zeros(count, dtype=torch.int32, device=device)
        token_ids = torch.zeros(count, 1, dtype=torch.int64, device=device)
        return SamplerOutput(token_ids, None, None, none, none.clone())

    def _hide(self, output: Any, rows: list[int]) -> None:
        if len(rows) < len(output.num_sampled):
            index = device_index(rows, output.num_sampled.device)
            output.num_sampled.index_fill_(0, index, 0)

    def feed(self, names: Sequence[str], token_ids: Sequence[int]) -> None:
        """Write a token for each request into the runner's sampled tokens."""
        req_states = self._runner.req_states
        rows = [req_states.req_id_to_index.get(name, -1) for name in names]
        # A request that was preempted is added again with all its tokens.
        present = [place for place, row in enumerate(rows) if row >= 0]
        last = req_states.last_sampled_tokens
        at = device_index([rows[place] for place in present], last.device)
        fed = device_index([token_ids[place] for place in present], last.device)
        last[:, 0].index_copy_(0, at, fed.to(last.dtype))
