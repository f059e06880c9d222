"""`RowSampler`: takes the place of a model runner's sampler for this library's requests.

It keeps the logits of requests whose rows are wanted until the engine has them reduced, and
draws the tokens of continuations. A *resident* request gets no token: the sampler reports that
nothing was sampled, and the request has nothing to compute until the caller's token is written
where the runner keeps the tokens that it sampled. vLLM has two model runners, which keep them
in different places.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from genlm.plugin import (
    EvaluationError,
    device_index,
    draw_tokens,
    rows_from_logits,
    stream_uniform,
)
from genlm_vllm.row_buffer import ROW_BUFFER, without_frames

__all__ = ["DRAWN", "OWN", "RESIDENT", "DrawPlan", "RowSampler", "missing_part", "sampler_of"]

OWN, RESIDENT, DRAWN = "genlm-", "genlm-resident-", "genlm-drawn-"
"""Prefixes of the ids of requests: of all, of those that stay, of continuations."""

_BATCH = ("req_ids", "req_id_to_index", "token_ids_cpu", "is_token_ids", "num_tokens_no_spec")
_PARTS: Mapping[bool, Mapping[str, Sequence[str]]] = {
    False: {"": ("discard_request_mask", "requests"), "input_batch": _BATCH},
    True: {"req_states": ("req_id_to_index", "last_sampled_tokens")},
}
"""Parts of the first and the second runner that keep residents, and the attributes of each."""

_MOST_FLAGS = 64
"""Number of tokens of a continuation after which their flags are combined into one."""


class DrawPlan(NamedTuple):
    """How the tokens of a continuation are drawn.

    Attributes:
        seed: Seed of the continuation.
        temperature: Divides the log-probabilities; 0 takes the most likely token.
        prompt_length: Number of tokens that are not drawn.
    """

    seed: int
    temperature: float
    prompt_length: int


def _is_second(runner: Any) -> bool:
    return hasattr(runner, "req_states")


def missing_part(runner: Any) -> str | None:
    """Return which part of a model runner is missing to keep residents, if any is."""
    for name, attributes in _PARTS[_is_second(runner)].items():
        part = getattr(runner, name, None) if name else runner
        for attribute in attributes:
            if not hasattr(part, attribute):
                return f"this vLLM's {name or 'model runner'} has no {attribute}"
    return None


def sampler_of(runner: Any, batches: int) -> RowSampler:
    """Replace the sampler of a model runner; see `RowSampler`."""
    return (_SecondRunnerSampler if _is_second(runner) else _FirstRunnerSampler)(
        runner, batches
    )


class RowSampler(abc.ABC):
    """Keeps logits, draws tokens, and samples other requests with vLLM's sampler.

    Args:
        runner: vLLM's model runner, whose sampler this object replaces.
        batches: Number of batches that may be computed before the rows of one are taken.

    Attributes:
        plans: Plans of continuations by the ids of their requests.
    """

    def __init__(self, runner: Any, batches: int) -> None:
        self._runner = runner
        self._base = runner.sampler
        self._kept: deque[tuple[torch.Tensor, dict[str, int]]] = deque(maxlen=batches)
        self.plans: dict[str, DrawPlan] = {}
        self._invalid: dict[str, list[torch.Tensor]] = {}  # whether draws were invalid
        self._errors: dict[str, Exception] = {}
        runner.sampler = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def remove(self) -> None:
        """Restore the runner's sampler."""
        self._runner.sampler = self._base
        self._kept.clear()

    # -- results ----------------------------------------------------------------------

    def take(self, names: Sequence[str]) -> tuple[torch.Tensor, list[int]]:
        """Return logits, and the rows of them that belong to requests of one batch.

        Raises:
            EvaluationError: The logits of a request are missing.
        """
        for logits, rows in reversed(self._kept):
            if names[0] in rows:
                if logits.is_cuda:  # the current stream is not the one that computed them
                    logits.record_stream(torch.cuda.current_stream(logits.device))
                return logits, [rows[name] for name in names]
        raise EvaluationError("vLLM finished the request without computing its row")

    def forget(self) -> None:
        """Free the logits of batches that are complete."""
        if self._kept.maxlen == 1:
            self._kept.clear()

    def finish_draws(self, name: str) -> Exception | None:
        """Forget a continuation; return its error if a row was not a distribution."""
        self.plans.pop(name, None)
        error, flags = self._errors.pop(name, None), self._invalid.pop(name, [])
        try:
            is_invalid = error is None and flags and bool(torch.stack(flags).any())
        except Exception as raised:  # noqa: BLE001 - out of memory; vLLM goes on
            return without_frames(raised)
        if not is_invalid:
            return error
        return EvaluationError(
            "vLLM computed a row that is not a distribution in a continuation: NaN or infinite "
            "logits. Try dtype='float32'"
        )

    def __len__(self) -> int:
        """Number of continuations."""
        return len(self.plans)

    # -- each step --------------------------------------------------------------------

    def __call__(self, logits: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Keep logits and draw tokens; sample requests that are not of this library."""
        names = self._names(*arguments)
        own = [row for row, name in enumerate(names) if name.startswith(OWN)]
        if not own:
            return self._base(logits, *arguments, **options)
        residents = [row for row in own if names[row].startswith(RESIDENT)]
        output = None
        if len(own) == len(names):
            output = self._nothing(len(names), logits.device, len(residents) == len(names))
        kept = logits
        if output is None:  # vLLM changes logits where it samples
            kept = logits.clone()
            output = self._base(logits, *arguments, **options)
        self._kept.append((kept, {names[row]: row for row in own}))
        draws = [row for row in own if names[row].startswith(DRAWN)]
        if draws:
            drawn = self._draw(kept, draws, [names[row] for row in draws], *arguments)
            index = device_index(draws, logits.device)
            output.sampled_token_ids[index, 0] = drawn.to(output.sampled_token_ids.dtype)
        if residents:
            self._hide(output, residents)
        return output

    def _draw(
        self, logits: torch.Tensor, rows: list[int], names: list[str], *arguments: Any
    ) -> torch.Tensor:
        plans = [self.plans[name] for name in names]
        try:
            index = device_index(rows, logits.device)
            with torch.inference_mode(False), torch.no_grad():
                found = rows_from_logits(logits[index], cast("Any", ROW_BUFFER.ids))
                counts = self._counts(names, rows, plans, *arguments)
                uniforms = [
                    stream_uniform(plan.seed, count)
                    for plan, count in zip(plans, counts, strict=True)
                ]
                tokens = draw_tokens(found, [plan.temperature for plan in plans], uniforms)
                # A row that is not a distribution is NaN everywhere; its draw may be any id.
                invalid = found[:, 0].isnan()
                tokens.masked_fill_(invalid, 0)
        except Exception as error:
            if not ROW_BUFFER.alone:  # other ranks go on with the tokens that they drew
                raise
            self._errors.update(dict.fromkeys(names, without_frames(error)))
            return torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for name, flag in zip(names, invalid.unbind(), strict=True):
            flags = self._invalid.setdefault(name, [])
            flags.append(flag)
            if len(flags) == _MOST_FLAGS:
                flags[:] = [torch.stack(flags).any()]
        return tokens

    @abc.abstractmethod
    def _names(self, *arguments: Any) -> Sequence[str]:
        """Return the ids of the batch's requests, in the order of the logits."""

    @abc.abstractmethod
    def _nothing(self, count: int, device: torch.device, all_stay: bool) -> Any:
        """Return vLLM's output for tokens that do not matter; None if vLLM must make it."""

    @abc.abstractmethod
    def _hide(self, output: Any, rows: list[int]) -> None:
        """Have the runner drop the sampled tokens of some rows."""

    @abc.abstractmethod
    def _counts(
        self, names: list[str], rows: list[int], plans: list[DrawPlan], *arguments: Any
    ) -> Sequence[int]:
        """Return how many tokens were drawn of continuations."""

    @abc.abstractmethod
    def feed(self, names: Sequence[str], token_ids: Sequence[int]) -> None:
        """Write a token for each request into the runner's sampled tokens."""


class _FirstRunnerSampler(RowSampler):
    """Sampler for vLLM's first model runner, which keeps the batch's tokens in main memory."""

    def _names(self, *_arguments: Any) -> Sequence[str]:
        names: Sequence[str] = self._runner.input_batch.req_ids
        return names

    def _nothing(self, count: int, device: torch.device, all_stay: bool) -> Any:
        del all_stay  # the runner drops the tokens of prompts that are not complete
        from vllm.v1.outputs import SamplerOutput

        return SamplerOutput(torch.zeros(count, 1, dtype=torch.int32, device=device), None)

    def _hide(self, output: Any, rows: list[int]) -> None:
        del output
        self._runner.discard_request_mask.np[rows] = True  # rebuilt for each batch

    def _counts(
        self, names: list[str], rows: list[int], plans: list[DrawPlan], *_arguments: Any
    ) -> Sequence[int]:
        del rows, plans
        return [len(self._runner.requests[name].output_token_ids) for name in names]

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


class _SecondRunnerSampler(RowSampler):
    """Sampler for vLLM's second model runner, which keeps the last token of each request."""

    def _names(self, *arguments: Any) -> Sequence[str]:
        names: Sequence[str] = arguments[0].req_ids
        return names

    def _nothing(self, count: int, device: torch.device, all_stay: bool) -> Any:
        if not all_stay:
            return None
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        none = torch.zeros(count, dtype=torch.int32, device=device)
        token_ids = torch.zeros(count, 1, dtype=torch.int64, device=device)
        return SamplerOutput(token_ids, None, None, none, none.clone())

    def _hide(self, output: Any, rows: list[int]) -> None:
        if len(rows) < len(output.num_sampled):
            index = device_index(rows, output.num_sampled.device)
            output.num_sampled.index_fill_(0, index, 0)

    def _counts(
        self, names: list[str], rows: list[int], plans: list[DrawPlan], *arguments: Any
    ) -> Sequence[int]:
        del names
        lengths = arguments[0].seq_lens_cpu_upper_bound.numpy()[rows].tolist()
        return [
            max(0, length - plan.prompt_length)
            for length, plan in zip(lengths, plans, strict=True)
        ]

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
