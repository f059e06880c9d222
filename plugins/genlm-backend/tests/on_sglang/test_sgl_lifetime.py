"""The end of one `AsyncSGLTransformer` and the next; schedulers handed to the constructor."""

from __future__ import annotations

import pytest
import torch

import genlm
from genlm.backend.llm import AsyncSGLTransformer
from genlm_sgl.cpu import stubs
from genlm_sgl.loading import default_options, environment
from genlm_sgl.process_state import quiet

IDS = [10, 11, 12]


def scheduler_of(folder, monkeypatch, **options):
    """SGLang's own object, as a program makes it."""
    options = {**default_options(cpu=True), **options, "model_path": str(folder)}
    variables = environment(cpu=True)
    with genlm.preserve_process_state(**variables), quiet(), stubs.stub_packages():
        from sglang.srt import runtime_context
        from sglang.srt.managers import scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        # A thread that never ends, and sends SIGQUIT to the parent process after five minutes.
        monkeypatch.setattr(scheduler, "create_scheduler_watchdog", lambda *_, **__: None)
        arguments = ServerArgs(**options)
        ports = PortArgs.init_new(arguments)
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        return scheduler.Scheduler(arguments, ports)


def assert_right(llm, tiny):
    found = llm.next_token_logprobs_sync(IDS)
    torch.testing.assert_close(found, tiny.logprobs(IDS).float(), atol=1e-4, rtol=0)


def test_a_model_that_was_cleaned_up_makes_way_for_the_next(tiny, options):
    first = AsyncSGLTransformer.from_name(str(tiny.path), engine_opts=options)
    with pytest.raises(genlm.ModelLoadError, match="Close the first one"):
        AsyncSGLTransformer.from_name(str(tiny.path), engine_opts=options)
    first.cleanup()
    with pytest.raises(genlm.EngineClosedError):
        first.next_token_logprobs_sync(IDS)
    with AsyncSGLTransformer.from_name(str(tiny.path), options, gpu_id=0) as second:
        assert_right(second, tiny)


def test_a_scheduler_is_ended_and_its_model_served_with_its_settings(
    tiny, options, monkeypatch
):
    scheduler = scheduler_of(tiny.path, monkeypatch, **options)
    with pytest.warns(DeprecationWarning, match=r"use AsyncSGLTransformer\.from_name"):
        llm = AsyncSGLTransformer(scheduler, cache_size=2)
    with llm:
        assert_right(llm, tiny)
        assert llm.max_context == options["context_length"]
        assert llm.cache.maxsize == 2
        assert vars(scheduler) == {}


def test_anything_else_is_refused(tiny):
    with pytest.raises(TypeError, match=r"got a str; expected a Scheduler.*from_name\(name\)"):
        AsyncSGLTransformer(str(tiny.path))
