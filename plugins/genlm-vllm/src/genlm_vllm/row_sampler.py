"""`RowSampler`: replaces a model runner's sampler for the requests of this library.

It stores the logits of a batch until they are reduced, and reports that no token was sampled. A
request then has nothing to compute until the caller's token is written where the runner stores
sampled tokens. vLLM has two model runners, which store them in different tensors.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genlm.plugin import EvaluationError, device_index

REQUEST_PREFIX = "genlm-"
"""Prefix of the ids of this library's requests."""


def replace_sampler(runner: Any, batches: int) -> RowSampler:
    """Replace the sampler of a model runner by a `RowSampler`."""
    is_second = hasattr(runner, "req_states")
    return (_SecondRunnerSampler if is_second else _FirstRunnerSampler)(runner, batches)


class RowSampler(abc.ABC):
    """Stores the logits of this library's requests; samples other requests with vLLM's sampler.

    Args:
        runner: vLLM's model runner, whose sampler this object replaces.
        batches: Number of batches whose logits are stored.
    """

    def __init__(self, runner: Any, batches: int) -> None:
        self._runner = runner
        self._base = runner.sampler
        self._batches: deque[tuple[torch.Tensor, dict[str, int]]] = deque(maxlen=batches)
        runner.sampler = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    # -- results ----------------------------------------------------------------------

    def take(self, names: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
        """Return the logits of a batch and the indices of some requests' rows.

        Args:
            names: Ids of requests of one batch.

        Raises:
            EvaluationError: The logits of a request are missing.
        """
        for logits, rows in reversed(self._batches):
            if names[0] in rows:
                if logits.is_cuda:  # the current stream is not the one that computed them
                    logits.record_stream(torch.cuda.current_stream(logits.device))
                return logits, [rows[name] for name in names]
        raise EvaluationError("vLLM finished the request without computing its row")

    def forget(self) -> None:
        """Free the logits of complete batches."""
        if self._batches.maxlen == 1:
            self._batches.clear()

    # -- steps ------------------------------------------------------------------------

    def __call__(self, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Store logits, and sample the requests that are not of this library."""
        names = self._names(*arguments)
        rows = {name: row for row, name in enumerate(names) if name.startswith(REQUEST_PREFIX)}
        if not rows:
            return self._base(logits, *arguments, **options)
        if len(rows) == len(names):
            stored, output = logits, self._placeholder_output(len(names), logits.device)
        else:  # vLLM's sampler changes logits
            stored, output = logits.clone(), self._base(logits, *arguments, **options)
        self._batches.append((stored, rows))
        self._discard_tokens(output, list(rows.values()))
        return output

    @abc.abstractmethod
    def _names(self, *arguments: Any) -> Sequence[str]:
        """Return the ids of the batch's requests, in the order of the logits."""

    @abc.abstractmethod
    def _placeholder_output(self, count: int, device: torch.device) -> Any:
        """Return vLLM's output type with placeholder tokens."""

    @abc.abstractmethod
    def _discard_tokens(self, output: Any, rows: list[int]) -> None:
        """Make the runner ignore the sampled tokens of some rows."""

    @abc.abstractmethod
    def feed(self, tokens: Mapping[str, int]) -> None:
        """Write the next tokens of requests, by their ids, into the runner's sampled tokens.

        A request that is not in the runner's batch is added to it later with all its tokens.
        """


class _FirstRunnerSampler(RowSampler):
    """Sampler for vLLM's first model runner, which stores a batch's tokens in main memory."""

    def _names(self, *_arguments: Any) -> Sequence[str]:
        names: Sequence[str] = self._runner.input_batch.req_ids
        return names

    def _placeholder_output(self, count: int, device: torch.device) -> Any:
        from vllm.v1.outputs import SamplerOutput

        return SamplerOutput(torch.zeros(count, 1, dtype=torch.int32, device=device), None)

    def _discard_tokens(self, output: Any, rows: list[int]) -> None:
        del output
        self._runner.discard_request_mask.np[rows] = True  # rebuilt for each batch

    def feed(self, tokens: Mapping[str, int]) -> None:
        input_batch, requests = self._runner.input_batch, self._runner.requests
        for name, token_id in tokens.items():
            requests[name].output_token_ids.append(token_id)
        rows, token_ids = _present(input_batch.req_id_to_index, tokens)
        ends = input_batch.num_tokens_no_spec[rows]
        input_batch.token_ids_cpu[rows, ends] = token_ids
        input_batch.is_token_ids[rows, ends] = True
        input_batch.num_tokens_no_spec[rows] = ends + 1


class _SecondRunnerSampler(RowSampler):
    """Sampler for vLLM's second model runner, which stores the last token of each request."""

    def _names(self, *arguments: Any) -> Sequence[str]:
        names: Sequence[str] = arguments[0].req_ids
        return names

    def _placeholder_output(self, count: int, device: torch.device) -> Any:
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        token_ids = torch.zeros(count, 1, dtype=torch.int64, device=device)
        return SamplerOutput(token_ids, None, None, zeros, zeros.clone())

    def _discard_tokens(self, output: Any, rows: list[int]) -> None:
        if len(rows) < len(output.num_sampled):
            index = device_index(rows, output.num_sampled.device)
            output.num_sampled.index_fill_(0, index, 0)

    def feed(self, tokens: Mapping[str, int]) -> None:
        req_states = self._runner.req_states
        rows, token_ids = _present(req_states.req_id_to_index, tokens)
        last = req_states.last_sampled_tokens
        index = device_index(rows, last.device)
        values = device_index(token_ids, last.device)
        last[:, 0].index_copy_(0, index, values.to(last.dtype))


def _present(
    index: Mapping[str, int], tokens: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """Return the rows of the requests that a runner has in its batch, and their tokens."""
    rows = {index[name]: token_id for name, token_id in tokens.items() if name in index}
    return list(rows), list(rows.values())
