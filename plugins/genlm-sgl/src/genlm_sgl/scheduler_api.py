"""SGLang's scheduler, whose event loop is run one iteration at a time.

All calls into a running SGLang are here, except for those about requests that stay
(`resident_api`) and about scores (`score_api`), which makes the module long. It identifies
requests by SGLang's ids; `Hooks` receive the logits and draw the tokens.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from genlm.plugin import EvaluationError
from genlm_sgl.lifecycle import (
    LoadWeightsHook,
    build_scheduler,
    close_sockets,
    leave_process_groups,
    senders,
    separate_streams,
)
from genlm_sgl.population_api import PopulationApi, obstacle_to_tables
from genlm_sgl.resident_api import ResidentApi, obstacle_to_stay
from genlm_sgl.score_api import ComputeLogits, obstacle_to_score, read_hidden_states

__all__ = ["FinishedRequest", "Hooks", "Iteration", "SchedulerApi"]


class Hooks(Protocol):
    """Callbacks of each forward pass."""

    def on_logits(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> None:
        """Read the logits before anything changes them.

        Args:
            rids: The request of each row.
            lengths: The number of tokens of the request that precede the row.
            logits: Shape `(len(rids), width)`.
        """
        ...

    def draw(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> torch.Tensor:
        """Choose the next token of each request: int64, shape `(len(rids),)`."""
        ...

    def on_hidden_states(
        self,
        rids: Sequence[str],
        begins: Sequence[int],
        lengths: Sequence[int],
        states: torch.Tensor,
        compute_logits: ComputeLogits,
    ) -> None:
        """Read the hidden states of a pass over prompts before its logits are computed.

        Args:
            rids: The requests, in the order of their tokens.
            begins: Position in its request of the first token of each.
            lengths: The number of tokens of each.
            states: Shape `(sum(lengths), hidden_size)`.
            compute_logits: Computes the logits after any of these tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that SGLang has finished.

    Attributes:
        rid: Id of the request.
        output_ids: The generated ids.
        abort_reason: Reason of an abort by SGLang; None if the request completed.
    """

    rid: str
    output_ids: list[int]
    abort_reason: str | None


@dataclass(frozen=True, slots=True)
class Iteration:
    """Result of one iteration of SGLang's event loop.

    Attributes:
        finished: The finished requests.
        processed: Ids of the requests whose result was processed, and that no running forward
            pass computes.
        progressed: Whether a batch was run or a result processed.
    """

    finished: list[FinishedRequest]
    processed: list[str]
    progressed: bool


class SchedulerApi:
    """SGLang's scheduler in this process.

    Args:
        options: Arguments of `ServerArgs`.
        gpu_id: Index of the GPU.
        on_load_weights: Called when the model is built, before its weights are loaded.

    Attributes:
        tokenizer: The model's tokenizer, as SGLang loads it.
        batches: Number of forward passes.
        tokens_computed: Number of tokens that the model computed.
        output_bias: Added to the logits of each pass; None for no bias.

    Raises:
        ModelLoadError: This version's scheduler has an unknown parameter.
        Exception: Any other error of SGLang.
    """

    def __init__(
        self, options: Mapping[str, Any], gpu_id: int, on_load_weights: LoadWeightsHook
    ) -> None:
        self._memory: Callable[[], contextlib.AbstractContextManager[object]]
        self._memory = contextlib.nullcontext
        if options.get("enable_lora") and options.get("device") == "cpu":
            from genlm_sgl.cpu.stubs import Unpinned

            self._memory = Unpinned
        with self._memory():
            scheduler = self._scheduler = build_scheduler(options, gpu_id, on_load_weights)
        self.tokenizer = scheduler.tokenizer
        # A request ends at its stop ids, not at the model's end-of-sequence ids.
        scheduler.tokenizer = None
        scheduler.model_config.hf_eos_token_id = None
        self.batches = self.tokens_computed = 0
        self.output_bias: torch.Tensor | None = None
        self._overlaps = bool(scheduler.enable_overlap)
        self._reqs: list[Any] = []  # of the batch that is running
        self._pending: deque[list[Any]] = deque()  # of the batches in `result_queue`
        self._aborted: list[FinishedRequest] = []
        # SGLang's own event loops set these before they begin.
        scheduler.result_queue = deque()
        scheduler.enable_skip_finishing_decode = self._overlaps
        separate_streams(scheduler)
        self._detach_senders()

    # -- the built model --------------------------------------------------------------

    @property
    def longest_prompt(self) -> int:
        """The longest prompt after which SGLang can generate a token."""
        # SGLang refuses `len >= max_req_input_len` (it runs `[0]` instead), never starts a
        # prompt that leaves no page of the KV cache free, and cuts such continuations.
        window = int(self._scheduler.max_req_input_len) - 1
        return min(window, self.token_capacity - 2 * int(self._scheduler.page_size) - 1)

    @property
    def embedding_rows(self) -> int:
        """Number of ids that the model embeds."""
        return int(self._scheduler.model_config.vocab_size)

    @property
    def model(self) -> Any:
        """The model as a torch module."""
        return self._scheduler.tp_worker.model_runner.model

    @property
    def text_config(self) -> Any:
        """The config of the text model, as SGLang has changed it."""
        return self._scheduler.model_config.hf_text_config

    @property
    def is_fallback(self) -> bool:
        """Whether SGLang has no model class and runs that of transformers."""
        return type(self.model).__module__ == "sglang.srt.models.transformers"

    @property
    def attention_backends(self) -> frozenset[str]:
        """SGLang's names of the attention backends for prefill and decode."""
        runner = self._scheduler.tp_worker.model_runner
        return frozenset(
            {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
        )

    @property
    def attention_backend(self) -> Any:
        """SGLang's attention backend."""
        return self._scheduler.tp_worker.model_runner.attn_backend

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        found: torch.dtype = self._scheduler.model_config.dtype
        return found

    @property
    def device(self) -> str:
        """The device of the logits, as torch names it."""
        return str(self._scheduler.tp_worker.model_runner.device)

    @property
    def token_capacity(self) -> int:
        """Size of the KV cache in tokens."""
        return int(self._scheduler.max_total_num_tokens)

    @property
    def page_size(self) -> int:
        """Number of slots in a page of the KV cache."""
        return int(self._scheduler.page_size)

    @property
    def free_tokens(self) -> int:
        """Number of free KV cache slots; cached prefixes count as used."""
        return int(self._scheduler.token_to_kv_pool_allocator.available_size())

    # -- requests ---------------------------------------------------------------------

    def enqueue(
        self,
        rid: str,
        token_ids: Sequence[int],
        max_new_tokens: int,
        stop: Collection[int],
        adapter_id: str | None = None,
    ) -> Any | None:
        """Add a request to the scheduler's queue.

        Args:
            rid: Its id, not a prefix of another id: SGLang aborts by prefix.
            token_ids: The prompt: at least one id, all of which the model embeds.
            max_new_tokens: 0 computes the logits after the prompt only.
            stop: Ids that end the continuation.
            adapter_id: Id of an adapter that `load_adapter` loaded; None for the base model.

        Returns:
            SGLang's request; None if SGLang refused it, which the next iteration reports.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=1.0,
            stop_token_ids=set(stop) or None,
            ignore_eos=not stop,
        )
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_ids=array("q", token_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            lora_id=adapter_id,
        )
        self._scheduler.process_input_requests([request])
        queue = self._scheduler.waiting_queue
        return queue[-1] if queue and queue[-1].rid == rid else None

    def abort(self, rid: str) -> None:
        """Abort a request; a running one ends with the next iteration."""
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.process_input_requests([AbortReq(rid=rid)])
        self._aborted = [each for each in self._aborted if each.rid != rid]

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs and no result is unprocessed."""
        scheduler = self._scheduler
        return (
            not scheduler.waiting_queue
            and scheduler.running_batch.is_empty()
            and scheduler.chunked_req is None
            and not self._pending
            and (scheduler.last_batch is None or scheduler.last_batch.is_empty())
        )

    @property
    def obstacle_to_stay(self) -> str | None:
        """Why requests cannot stay after their rows; None if they can."""
        return obstacle_to_stay(self._scheduler)

    def resident_api(self) -> ResidentApi:
        """Return the calls about requests that stay."""
        return ResidentApi(self._scheduler, self._compute_context)

    @property
    def obstacle_to_tables(self) -> str | None:
        """Why populations cannot be computed from block tables; None if they can."""
        return obstacle_to_tables(self._scheduler)

    def population_api(self) -> PopulationApi:
        """Return the calls about populations."""
        return PopulationApi(self._scheduler, self._compute_context, self._biased)

    # -- adapters ---------------------------------------------------------------------

    def load_adapter(self, adapter_id: str, name: str, folder: str) -> str | None:
        """Load a LoRA adapter while no request runs.

        Its weights are moved into the model's buffers at once, because SGLang compares their
        shapes only then.

        Args:
            adapter_id: A new id, by which requests name the adapter.
            name: SGLang's name of the adapter.
            folder: The adapter's folder.

        Returns:
            None, or the reason why SGLang refuses the adapter, which is then unloaded.
        """
        from sglang.srt.managers import io_struct

        scheduler = self._scheduler
        names = {"lora_name": name, "lora_id": adapter_id}
        with self._compute_context():
            loaded = scheduler.load_lora_adapter(
                io_struct.LoadLoRAAdapterReqInput(lora_path=folder, **names)
            )
            if not loaded.success:
                return str(loaded.error_message)
            try:
                scheduler.tp_worker.model_runner.lora_manager.fetch_new_loras({adapter_id})
            except Exception as error:  # noqa: BLE001 - including assertions
                scheduler.unload_lora_adapter(io_struct.UnloadLoRAAdapterReqInput(**names))
                return str(error)
        return None

    def unload_adapter(self, adapter_id: str, name: str) -> str | None:
        """Unload a LoRA adapter while no request runs; return the reason of a failure."""
        from sglang.srt.managers import io_struct

        request = io_struct.UnloadLoRAAdapterReqInput(lora_name=name, lora_id=adapter_id)
        with self._compute_context():
            result = self._scheduler.unload_lora_adapter(request)
        return None if result.success else str(result.error_message)

    # -- the loop ---------------------------------------------------------------------

    def run_once(self) -> Iteration:
        """Run one iteration of SGLang's event loop."""
        scheduler = self._scheduler
        with self._compute_context():
            batch = self._next_batch()
            if self._overlaps:
                processed, progressed = self._overlapped(batch)
            else:
                processed, progressed = [], bool(batch)
                if batch:
                    processed = list(batch.reqs)  # row j of the logits belongs to the j-th
                    with self._running(processed):
                        result = scheduler.run_batch(batch)
                    scheduler.process_batch_result(batch, result)
            scheduler.last_batch = batch
        finished = _finished(processed) + self._aborted
        self._aborted = []
        running = {req.rid for reqs in self._pending for req in reqs}
        rids = [req.rid for req in processed if req.rid not in running]
        return Iteration(finished, rids, progressed)

    def _next_batch(self) -> Any:
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        scheduler.cur_batch_for_debug = plan.batch_to_run
        return plan.batch_to_run

    @contextlib.contextmanager
    def _running(self, reqs: list[Any]) -> Iterator[None]:
        """Tell the hooks the requests of a pass's rows."""
        self._reqs = reqs
        try:
            yield
        finally:
            self._reqs = []

    def _overlapped(self, batch: Any) -> tuple[list[Any], bool]:
        """Run a batch and process the result of the one before it; return its requests."""
        scheduler = self._scheduler
        last = scheduler.last_batch
        processed: list[Any] = []
        sequential = scheduler.is_disable_overlap_for_batch(batch, last_batch=last)
        if sequential:
            processed += self._process_oldest()
        result = None
        reqs = list(batch.reqs) if batch else []
        if batch:
            with self._running(reqs):
                result = scheduler.run_batch(batch)
            scheduler._apply_war_barrier()  # noqa: SLF001 - as in SGLang's loop
            scheduler.result_queue.append((batch.copy(), result))
            self._pending.append(reqs)
        if last and not sequential:
            processed += self._process_oldest()
        with self._running(reqs):  # may draw tokens that `run_batch` did not
            scheduler.launch_batch_sample_if_needed(result, batch)
        return processed, bool(batch or last)

    def _process_oldest(self) -> list[Any]:
        scheduler = self._scheduler
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
        return self._pending.popleft()

    # -- the cache --------------------------------------------------------------------

    def flush(self) -> bool:
        """Empty the radix cache; return False if a request still runs.

        SGLang keeps the memory. Emptying the device's allocator as well would take half a
        second on a CPU, because it collects garbage.
        """
        with torch.inference_mode():
            return bool(self._scheduler.flush_cache(empty_cache=False))

    def check_idle(self) -> None:
        """Run SGLang's check for leaked slots, as its loop does when idle.

        Raises:
            Exception: SGLang found leaked slots.
        """
        with torch.inference_mode():
            self._scheduler.on_idle()

    def reset(self) -> None:
        """Drop all requests and cached prefixes, after a forward pass that raised."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        scheduler.waiting_queue.clear()
        scheduler.result_queue.clear()
        self._pending.clear()
        self._aborted.clear()
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.chunked_req = scheduler.last_batch = scheduler.cur_batch_for_debug = None
        scheduler._pending_chunked_abort_req = None  # noqa: SLF001
        if not self.flush():
            raise RuntimeError("SGLang's scheduler cannot be reset; load the model again")

    # -- the end ----------------------------------------------------------------------

    def close(self) -> None:
        """Shut SGLang down."""
        scheduler, self._scheduler = self._scheduler, None
        runner = scheduler.tp_worker.model_runner
        for name in ("forward", "sample"):
            vars(runner).pop(name, None)
        close_sockets(scheduler)
        del runner, scheduler
        leave_process_groups()

    # -- wiring -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _compute_context(self) -> Iterator[None]:
        """The torch modes and the stream in which SGLang's model code runs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self.device != "cpu":
                stream = self._scheduler.schedule_stream
                stack.enter_context(torch.get_device_module(self.device).stream(stream))
            stack.enter_context(self._memory())
            yield

    def _detach_senders(self) -> None:
        """Replace the senders: the queues of unread sockets would grow without limit."""
        for sender in senders(self._scheduler):
            sender.send_output = self._note_abort

    def _note_abort(self, output: Any, _request: Any = None) -> None:
        # Requests that finish in a batch are found there; these are aborted outside of one.
        if type(output).__name__ == "AbortReq":
            reason = output.finished_reason or {}
            why = reason.get("message") or output.abort_message or "no reason given"
            self._aborted.append(FinishedRequest(output.rid, [], str(why)))

    def install_hooks(self, hooks: Hooks) -> None:
        """Pass the logits of all forward passes to `hooks`, which draws the tokens."""
        runner = self._scheduler.tp_worker.model_runner
        forward: Callable[..., Any] = runner.forward

        def hooked_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(forward_batch, *args, **kwargs)
            self.batches += 1
            self.tokens_computed += len(forward_batch.input_ids)
            if self._reqs:  # else a pass of a population
                logits = self._biased(output.logits_output.next_token_logits)
                hooks.on_logits(*self._rows(forward_batch), logits)
            return output

        def draw(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            logits = self._biased(logits_output.next_token_logits)
            return hooks.draw(*self._rows(forward_batch), logits)

        runner.forward, runner.sample = hooked_forward, draw

    @property
    def obstacle_to_score(self) -> str | None:
        """Why texts cannot be scored from hidden states; None if they can."""
        return obstacle_to_score(self._scheduler)

    def read_hidden_states(self, hooks: Hooks) -> Any:
        """Pass the hidden states of passes over prompts to `hooks`; `remove` ends that."""

        def read(forward_batch: Any, states: torch.Tensor, compute: ComputeLogits) -> None:
            if not self._reqs:
                return
            if len(states) != len(forward_batch.input_ids):
                raise EvaluationError(
                    f"SGLang computed {len(states)} hidden states of "
                    f"{len(forward_batch.input_ids)} tokens"
                )
            rids, ends = self._rows(forward_batch)
            lengths = forward_batch.extend_seq_lens_cpu
            begins = [end - length for end, length in zip(ends, lengths, strict=True)]
            hooks.on_hidden_states(
                rids, begins, lengths, states, lambda some: self._biased(compute(some))
            )

        return read_hidden_states(self.model, read)

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.output_bias is None else logits + self.output_bias

    def _rows(self, forward_batch: Any) -> tuple[list[str], list[int]]:
        lengths = forward_batch.seq_lens_cpu
        if lengths is None:
            lengths = forward_batch.seq_lens
        return [req.rid for req in self._reqs], lengths.tolist()


def _finished(reqs: Sequence[Any]) -> list[FinishedRequest]:
    return [
        FinishedRequest(req.rid, list(req.output_ids), _abort_reason(req.finished_reason))
        for req in reqs
        if req.finished()
    ]


def _abort_reason(reason: Any) -> str | None:
    # The logits of such a request are those of another prompt, `[0]`.
    return str(reason.message) if type(reason).__name__ == "FINISH_ABORT" else None
