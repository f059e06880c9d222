"""SGLang's own scheduler in a separate process, for comparisons with genlm-sgl.

SGLang has one scheduler or engine in a process. The scheduler is driven in the child without
SGLang's server, tokenizer and detokenizer processes: requests are added to its queue, and its
event loop runs until they have finished.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["OwnScheduler"]


class OwnScheduler:
    """SGLang's scheduler with a model, in a child process on the CPU.

    Args:
        folder: The model.
        options: Arguments of `ServerArgs`.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, folder, dict(options)), daemon=True
        )
        self._process.start()
        self._connection.recv()

    def decode(
        self, prompts: Sequence[Sequence[int]], steps: int, temperature: float = 0.0
    ) -> tuple[float, float]:
        """Generate; return the seconds of CPU and wall-clock time of the decodes.

        Args:
            prompts: The prompts, which are computed before the clock starts.
            steps: Number of tokens that are decoded after each prompt.
            temperature: 0 takes the most likely tokens, others draw.
        """
        self._request(prompts=[_common(prompts)], max_new_tokens=0, flush=True)
        found = self._request(
            prompts=prompts, max_new_tokens=steps + 1, flush=False, temperature=temperature
        )
        return found["decodes"]

    def compute(self, prompts: Sequence[Sequence[int]], *, flush: bool) -> tuple[float, float]:
        """Compute prompts; return the seconds of CPU and wall-clock time.

        Args:
            prompts: The prompts.
            flush: Whether to empty the radix cache first.
        """
        return self._request(prompts=prompts, max_new_tokens=0, flush=flush)["prompts"]

    def score(
        self, texts: Sequence[Sequence[int]], start: int
    ) -> tuple[list[list[float]], float]:
        """Return the log-probabilities of tokens from `start` on, and seconds of CPU time."""
        found = self._request(prompts=texts, max_new_tokens=0, flush=False, start=start)
        return found["logprobs"], found["prompts"][0]

    def _request(self, **request: Any) -> dict[str, Any]:
        self._connection.send(request)
        found: dict[str, Any] = self._connection.recv()
        return found

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def _serve(connection: Connection, folder: Path, options: Mapping[str, Any]) -> None:
    import genlm
    from genlm_sgl.cpu.stubs import stub_packages
    from genlm_sgl.loading import default_options, environment
    from genlm_sgl.process_state import quiet

    options = {
        **default_options(cpu=True),
        "disable_radix_cache": False,
        **options,
        "model_path": str(folder),
    }
    logging.getLogger("sglang").setLevel(logging.ERROR)
    with genlm.preserve_process_state(**environment(cpu=True)), quiet(), stub_packages():
        scheduler = _scheduler(options)
    connection.send(None)
    while (request := connection.recv()) is not None:
        if request.pop("flush"):
            scheduler.flush_cache(empty_cache=False)
        connection.send(_run(scheduler, **request))


def _scheduler(options: Mapping[str, Any]) -> Any:
    from sglang.srt import runtime_context
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    known = inspect.signature(ServerArgs).parameters
    arguments = ServerArgs(**{name: each for name, each in options.items() if name in known})
    ports = PortArgs.init_new(arguments)
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    scheduler: Any = Scheduler(arguments, ports)
    scheduler.result_queue = deque()
    for sender in (
        scheduler.ipc_channels.send_to_tokenizer,
        scheduler.ipc_channels.send_to_detokenizer,
    ):
        sender.send_output = lambda *_: None  # nobody reads them
    return scheduler


def _run(
    scheduler: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    start: int | None = None,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Run requests; return the seconds until all were computed once, and those after that.

    With `start`, the log-probabilities of the prompts' tokens from there on, too.
    """
    import torch
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    clocks, reqs = [(time.process_time(), time.perf_counter())], []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=True
        )
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"{number}.",
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=start is not None,
            logprob_start_len=-1 if start is None else start - 1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        scheduler.process_input_requests([request])
        reqs.append(scheduler.waiting_queue[-1])
    with torch.inference_mode():
        while scheduler.waiting_queue:
            _iterate(scheduler)
        clocks.append((time.process_time(), time.perf_counter()))
        while _iterate(scheduler):
            pass
    clocks.append((time.process_time(), time.perf_counter()))
    first, middle, last = clocks
    return {
        "prompts": (middle[0] - first[0], middle[1] - first[1]),
        "decodes": (last[0] - middle[0], last[1] - middle[1]),
        "logprobs": start and [req.logprob.input_token_logprobs_val[1:] for req in reqs],
    }


def _iterate(scheduler: Any) -> bool:
    """Run an iteration of SGLang's event loop; return False if there is no batch."""
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch:
        result = scheduler.run_batch(batch)
        scheduler.process_batch_result(batch, result)
    scheduler.last_batch = batch
    return bool(batch)


def _common(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the common beginning of prompts."""
    length = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return prompts[0][:length]
