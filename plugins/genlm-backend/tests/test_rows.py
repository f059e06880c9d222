"""Rows as the library states them: float32, normalised, one column per string, on `device`."""

from __future__ import annotations

import asyncio

import torch

import genlm
from genlm.backend import load_model_by_name
from genlm.backend.llm import MockAsyncLM
from genlm.backend.llm.served import ServedLM

from .tiny import SIZE


def assert_rows(llm, rows, count):
    assert rows.shape == (count, len(llm.str_vocab))
    assert rows.dtype == torch.float32
    assert rows.device == llm.device
    torch.testing.assert_close(rows.logsumexp(-1), torch.zeros(count), atol=1e-4, rtol=0)


def assert_all_ways(llm):
    ids = [[1, 2, 3], [1, 2, 3, 4], [5], [5, 6]]
    assert_rows(llm, llm.batch_next_token_logprobs_sync(ids), len(ids))
    assert_rows(llm, asyncio.run(llm.batch_next_token_logprobs(ids)), len(ids))
    assert_rows(llm, llm.next_token_logprobs_sync(ids[0])[None], 1)
    assert_rows(llm, asyncio.run(llm.next_token_logprobs(ids[0]))[None], 1)


def test_rows_of_transformers_with_more_logits_than_tokens(llm):
    assert llm.model.config.vocab_size > SIZE
    assert_all_ways(llm)


def test_rows_of_the_mock(tokenizer):
    assert_all_ways(MockAsyncLM(tokenizer))


def test_rows_of_another_engine():
    with load_model_by_name("demo", backend="reference") as llm:
        assert_all_ways(llm)


def test_rows_of_an_engine_with_fewer_logits_than_tokens(tokenizer):
    class Narrow(genlm.BatchEngine):
        capabilities = frozenset()
        max_context = None
        vocabulary = genlm.plugin.Vocabulary.from_tokenizer(tokenizer)

        def evaluate(self, queries):
            logits = torch.randn(len(queries), SIZE - 2, dtype=torch.float16)
            return genlm.plugin.rows_from_logits(logits, self.vocabulary)

    with ServedLM(Narrow, name="narrow") as llm:
        assert_all_ways(llm)
        assert llm.next_token_logprobs_sync([1])[-2:].isneginf().all()


def test_a_model_of_ones_own_can_normalise_any_logits(tokenizer):
    llm = MockAsyncLM(tokenizer)
    wide = torch.randn(3, SIZE + 100, dtype=torch.float16)
    wide[:, SIZE:] = 50  # would take all of the probability
    rows = llm._normalize(wide)
    assert_rows(llm, rows, 3)
    torch.testing.assert_close(rows, wide[:, :SIZE].float().log_softmax(-1))
    narrow = llm._normalize(wide[0, : SIZE - 2])
    assert_rows(llm, narrow[None], 1)
    assert narrow[-2:].isneginf().all()
