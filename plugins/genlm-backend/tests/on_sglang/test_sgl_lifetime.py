"""The end of one `AsyncSGLTransformer` and the next."""

from __future__ import annotations

import pytest
import torch

import genlm
from genlm.backend.llm import AsyncSGLTransformer

IDS = [10, 11, 12]


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
