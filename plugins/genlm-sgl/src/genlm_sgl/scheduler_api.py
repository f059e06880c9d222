"""SGLang's scheduler, whose loop is turned by hand, one iteration at a time.

It knows SGLang's requests by their ids and nothing of queries, rows or sampling; `Hooks` are
told about logits. A little longer than other modules: what is known of one foreign object is
one concept.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from genlm_sgl.cpu_shim import Unpinned
from genlm_sgl.starting import WatchWeights, close_sockets, leave_groups, senders, started

__all__ = ["Ended", "Hooks", "SchedulerApi"]


class Hooks(Protocol):
    """What is told about each forward pass, and draws."""

    def saw_logits(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> None:
        """Look at the logits, one row per request, before anything changes them.

        Args:
            rids: Of which request each row is.
            lengths: How many tokens of the request each row follows.
            logits: Shape `(len(rids), width)`.
        """
        ...

    def draw(self, rids: Sequence[str], lengths: Sequence[int], logits: Any) -> torch.Tensor:
        """Choose the next token of each request: int64, shape `(len(rids),)`."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that SGLang is done with.

    Attributes:
        rid: Its id.
        output_ids: What was generated for it.
        aborted: Why SGLang gave it up; None if it did not.
    """

    rid: str
    output_ids: list[int]
    aborted: str | None


class SchedulerApi:
    """SGLang's scheduler, driven by hand.

    Args:
        options: Arguments of `ServerArgs`.
        gpu_id: Which GPU.
        watch_weights: Is called when the model is built and before it has its weights.

    Attributes:
        tokenizer: Of the model, as SGLang loads it.
        batches: Forward passes so far.
        tokens_computed: Tokens that went through the model so far.
        output_bias: What is added to the logits of each pass; None for nothing.

    Raises:
        ModelLoadError: This version's scheduler takes something unknown.
        Exception: Whatever else SGLang raises.
    """

    def __init__(
        self, options: Mapping[str, Any], gpu_id: int, watch_weights: WatchWeights
    ) -> None:
        self._unpinned = bool(options.get("enable_lora")) and options.get("device") == "cpu"
        with Unpinned() if self._unpinned else contextlib.nullcontext():
            scheduler = self._scheduler = started(options, gpu_id, watch_weights)
        self.tokenizer = scheduler.tokenizer
        # Only ids that a request names may end it, not those that the model calls ends.
        scheduler.tokenizer = None
        scheduler.model_config.hf_eos_token_id = None
        self.batches = self.tokens_computed = 0
        self.output_bias: torch.Tensor | None = None
        self._overlaps = bool(scheduler.enable_overlap)
        self._reqs: list[Any] = []  # of the batch that is running
        self._pending: deque[list[Any]] = deque()  # of the batches in `result_queue`
        self._given_up: list[Ended] = []
        # What SGLang's own loops set before they begin.
        scheduler.result_queue = deque()
        scheduler.enable_skip_finishing_decode = self._overlaps
        scheduler._war_barrier_enabled = scheduler.device == "cuda"  # noqa: SLF001
        self._detach_senders()

    # -- what was built ---------------------------------------------------------------

    @property
    def longest_prompt(self) -> int:
        """The most tokens that SGLang takes as a prompt and can draw one more after."""
        # It refuses `len >= max_req_input_len` (and runs `[0]` instead), never starts what
        # leaves no page of the KV cache free, and cuts a continuation that would not.
        window = int(self._scheduler.max_req_input_len) - 1
        return min(window, self.token_capacity - 2 * int(self._scheduler.page_size) - 1)

    @property
    def embedding_rows(self) -> int:
        """How many ids the model can embed."""
        return int(self._scheduler.model_config.vocab_size)

    @property
    def model(self) -> Any:
        """The torch module that runs."""
        return self._scheduler.tp_worker.model_runner.model

    @property
    def text_config(self) -> Any:
        """The config of the text model, as SGLang has changed it."""
        return self._scheduler.model_config.hf_text_config

    @property
    def is_fallback(self) -> bool:
        """Whether SGLang, having no model class of its own, runs that of transformers."""
        return type(self.model).__module__ == "sglang.srt.models.transformers"

    @property
    def attention_backends(self) -> frozenset[str]:
        """What SGLang calls the attention that it computes prompts and single tokens with."""
        runner = self._scheduler.tp_worker.model_runner
        return frozenset(
            {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
        )

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        found: torch.dtype = self._scheduler.model_config.dtype
        return found

    @property
    def device(self) -> str:
        """Where the logits are, as torch calls it."""
        return str(self._scheduler.tp_worker.model_runner.device)

    @property
    def token_capacity(self) -> int:
        """How many tokens the KV cache holds."""
        return int(self._scheduler.max_total_num_tokens)

    @property
    def free_tokens(self) -> int:
        """How many tokens of the KV cache hold nothing, not even a cached prefix."""
        return int(self._scheduler.token_to_kv_pool_allocator.available_size())

    # -- requests ---------------------------------------------------------------------

    def enqueue(
        self,
        rid: str,
        token_ids: Sequence[int],
        max_new_tokens: int,
        stop: Collection[int],
        adapter_id: str | None = None,
    ) -> None:
        """Hand a request to the scheduler.

        Args:
            rid: Its id, the beginning of no other's: SGLang aborts by beginnings.
            token_ids: The prompt, of at least one id that the model can embed.
            max_new_tokens: 0 asks for the logits after the prompt alone.
            stop: Ids that end the continuation.
            adapter_id: Of an adapter that `load_adapter` loaded; None for the model alone.
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

    def abort(self, rid: str) -> None:
        """Have the scheduler forget a request; what runs ends with its next step."""
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.process_input_requests([AbortReq(rid=rid)])
        self._given_up = [ended for ended in self._given_up if ended.rid != rid]

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is unprocessed."""
        scheduler = self._scheduler
        return (
            not scheduler.waiting_queue
            and scheduler.running_batch.is_empty()
            and scheduler.chunked_req is None
            and not self._pending
            and (scheduler.last_batch is None or scheduler.last_batch.is_empty())
        )

    # -- adapters ---------------------------------------------------------------------

    def load_adapter(self, adapter_id: str, name: str, folder: str) -> str | None:
        """Have SGLang load a LoRA adapter, while nothing runs.

        Its weights are put where the model computes with them at once: SGLang compares their
        shapes only then.

        Args:
            adapter_id: Never used before; requests name it.
            name: What SGLang calls it.
            folder: Where it is.

        Returns:
            None, or why SGLang does not serve it; it is then forgotten.
        """
        from sglang.srt.managers import io_struct

        scheduler = self._scheduler
        names = {"lora_name": name, "lora_id": adapter_id}
        with self._working():
            loaded = scheduler.load_lora_adapter(
                io_struct.LoadLoRAAdapterReqInput(lora_path=folder, **names)
            )
            if not loaded.success:
                return str(loaded.error_message)
            try:
                scheduler.tp_worker.model_runner.lora_manager.fetch_new_loras({adapter_id})
            except Exception as error:  # noqa: BLE001 - assertions among others
                scheduler.unload_lora_adapter(io_struct.UnloadLoRAAdapterReqInput(**names))
                return str(error)
        return None

    def unload_adapter(self, adapter_id: str, name: str) -> str | None:
        """Have SGLang drop a LoRA adapter, while nothing runs; return why it did not."""
        from sglang.srt.managers import io_struct

        request = io_struct.UnloadLoRAAdapterReqInput(lora_name=name, lora_id=adapter_id)
        with self._working():
            result = self._scheduler.unload_lora_adapter(request)
        return None if result.success else str(result.error_message)

    # -- the loop ---------------------------------------------------------------------

    def turn(self) -> tuple[list[Ended], bool]:
        """Turn SGLang's loop once.

        Returns:
            The requests that ended, and whether a batch was run or its result processed.
        """
        scheduler = self._scheduler
        with self._working():
            batch = self._next_batch()
            if self._overlaps:
                ended, moved = self._overlapped(batch)
            else:
                ended, moved = [], bool(batch)
                if batch:
                    reqs = list(batch.reqs)  # row j of the logits is the j-th of these
                    result = self._run(batch, reqs)
                    scheduler.process_batch_result(batch, result)
                    ended = _ended(reqs)
            scheduler.last_batch = batch
        ended += self._given_up
        self._given_up = []
        return ended, moved

    def _next_batch(self) -> Any:
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        scheduler.cur_batch_for_debug = plan.batch_to_run
        return plan.batch_to_run

    def _run(self, batch: Any, reqs: list[Any]) -> Any:
        self._reqs = reqs
        try:
            return self._scheduler.run_batch(batch)
        finally:
            self._reqs = []

    def _overlapped(self, batch: Any) -> tuple[list[Ended], bool]:
        """Run a batch and process the result of the one before it."""
        scheduler = self._scheduler
        last = scheduler.last_batch
        ended: list[Ended] = []
        in_turn = scheduler.is_disable_overlap_for_batch(batch, last_batch=last)
        if in_turn:
            ended += self._process_oldest()
        result = None
        if batch:
            reqs = list(batch.reqs)
            result = self._run(batch, reqs)
            scheduler._apply_war_barrier()  # noqa: SLF001 - as its own loop does
            scheduler.result_queue.append((batch.copy(), result))
            self._pending.append(reqs)
        if last and not in_turn:
            ended += self._process_oldest()
        scheduler.launch_batch_sample_if_needed(result, batch)
        return ended, bool(batch or last)

    def _process_oldest(self) -> list[Ended]:
        scheduler = self._scheduler
        batch, result = scheduler.result_queue.popleft()
        reqs = self._pending.popleft()
        scheduler.process_batch_result(batch, result)
        return _ended(reqs)

    # -- the cache --------------------------------------------------------------------

    def flush(self) -> bool:
        """Empty the radix cache; False when something still runs."""
        with torch.inference_mode():
            return bool(self._scheduler.flush_cache())

    def check_idle(self) -> None:
        """Have SGLang look for leaked slots and settle down, as it does when idle.

        Raises:
            Exception: What SGLang raises if it finds some.
        """
        with torch.inference_mode():
            self._scheduler.on_idle()

    def start_over(self) -> None:
        """Drop all requests and cached prefixes, after a forward pass that raised."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        scheduler.waiting_queue.clear()
        scheduler.result_queue.clear()
        self._pending.clear()
        self._given_up.clear()
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.chunked_req = scheduler.last_batch = scheduler.cur_batch_for_debug = None
        scheduler._pending_chunked_abort_req = None  # noqa: SLF001
        if not self.flush():
            raise RuntimeError("SGLang's scheduler cannot be reset; load the model again")

    # -- the end ----------------------------------------------------------------------

    def close(self) -> None:
        """Take SGLang down as far as it lets itself be."""
        scheduler, self._scheduler = self._scheduler, None
        runner = scheduler.tp_worker.model_runner
        for name in ("forward", "sample"):
            vars(runner).pop(name, None)
        close_sockets(scheduler)
        del runner, scheduler
        leave_groups()

    # -- wiring -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """What SGLang's model code runs in."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if "cuda" in self.device:
                stack.enter_context(torch.cuda.stream(self._scheduler.schedule_stream))
            if self._unpinned:
                stack.enter_context(Unpinned())
            yield

    def _detach_senders(self) -> None:
        """Keep answers here: nobody reads the sockets, whose queues would grow for ever."""
        for sender in senders(self._scheduler):
            sender.send_output = self._note_given_up

    def _note_given_up(self, output: Any, _request: Any = None) -> None:
        # Requests that end in a batch are found there; these end outside of any.
        if type(output).__name__ == "AbortReq":
            reason = output.finished_reason or {}
            why = reason.get("message") or output.abort_message or "no reason given"
            self._given_up.append(Ended(output.rid, [], str(why)))

    def watch(self, hooks: Hooks) -> None:
        """Show the logits of all forward passes to `hooks`, and let it draw the tokens."""
        runner = self._scheduler.tp_worker.model_runner
        forward: Callable[..., Any] = runner.forward

        def seen_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(forward_batch, *args, **kwargs)
            self.batches += 1
            self.tokens_computed += len(forward_batch.input_ids)
            logits = self._biased(output.logits_output.next_token_logits)
            hooks.saw_logits(*self._rows(forward_batch), logits)
            return output

        def draw(logits_output: Any, forward_batch: Any) -> torch.Tensor:
            logits = self._biased(logits_output.next_token_logits)
            return hooks.draw(*self._rows(forward_batch), logits)

        runner.forward, runner.sample = seen_forward, draw

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.output_bias is None else logits + self.output_bias

    def _rows(self, forward_batch: Any) -> tuple[list[str], list[int]]:
        lengths = forward_batch.seq_lens_cpu
        if lengths is None:
            lengths = forward_batch.seq_lens
        return [req.rid for req in self._reqs], lengths.tolist()


def _ended(reqs: Sequence[Any]) -> list[Ended]:
    return [
        Ended(req.rid, list(req.output_ids), _why_aborted(req.finished_reason))
        for req in reqs
        if req.finished()
    ]


def _why_aborted(reason: Any) -> str | None:
    # The row of such a request is that of another prompt, `[0]`.
    return str(reason.message) if type(reason).__name__ == "FINISH_ABORT" else None
