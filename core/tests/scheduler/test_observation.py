"""Laws: what logs and traces show of each step, and that they change nothing else."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted import ScriptedEngine, oracle_row

from genlm import EvaluationError
from genlm.core.scheduler import observation


class CountingEngine(ScriptedEngine):
    """Counts the tokens of its queries as computed."""

    tokens_computed = 0

    def evaluate(self, queries):
        self.tokens_computed += sum(len(query.token_ids) for query in queries)
        return super().evaluate(queries)

    def statistics(self):
        return {"tokens_computed": self.tokens_computed}


@pytest.fixture
def records(caplog):
    """The records of `genlm.batches` at DEBUG and above."""
    caplog.set_level(logging.DEBUG, "genlm.batches")
    return caplog


@pytest.fixture
def spans(monkeypatch):
    """An exporter behind the tracer provider of the program, which can be set only once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def ask(llm, *sequences):
    async def main():
        requests = map(llm.next_token_logprobs, sequences)
        return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(main())


def test_each_batch_is_one_line_at_debug_with_its_size_tokens_and_time(start, records):
    llm, _ = start(CountingEngine())
    ask(llm, [1, 2], [3, 4, 5], [6])
    ask(llm, [1])
    batch_records = [record for record in records.records if record.name == "genlm.batches"]
    first, second = (record.getMessage() for record in batch_records)
    assert first.startswith(
        f"genlm-{llm.name}: step of 3 queries, 3 finished, 6 tokens computed, "
    )
    assert first.endswith(" ms")
    assert "step of 1 queries, 1 finished, 1 tokens computed" in second


def test_an_engine_that_counts_no_tokens_is_logged_without_them(start, records):
    llm, engine = start(ScriptedEngine(poison=[7]))
    _, failed = ask(llm, [1], [7])
    assert isinstance(failed, EvaluationError)
    assert "step of 2 queries, 2 finished, 1 failed, " in records.text
    assert "tokens" not in records.text
    engine.statistics = lambda: {}["missing"]  # a fault there must not end the thread
    ask(llm, [2])
    torch.testing.assert_close(llm.next_token_logprobs_sync([3]), oracle_row([3], None, 16))


def test_nothing_is_logged_and_no_figure_taken_above_debug(start, caplog):
    engine = CountingEngine()
    llm, _ = start(engine)
    snapshots = []
    engine.statistics = lambda: snapshots.append("figures") or {}
    caplog.set_level(logging.INFO, "genlm.batches")
    ask(llm, [1], [2])
    assert caplog.records == []
    assert snapshots == []


def test_a_fault_in_the_reports_of_a_step_is_logged_and_its_requests_are_answered(
    start, caplog, monkeypatch
):
    def observe(self, step, engine, queries):
        step(engine)
        raise OSError("the exporter is gone")

    monkeypatch.setattr(observation.StepObserver, "observe", observe)
    llm, _ = start()
    for token_id in range(2):
        [row] = ask(llm, [token_id])
        torch.testing.assert_close(row, oracle_row([token_id], None, 16))
    assert "the exporter is gone" in caplog.text


def test_slow_steps_are_warnings_that_do_not_come_with_every_step(start, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "genlm.batches")
    monkeypatch.setattr(observation, "SLOW_STEP_S", 0.0)
    monkeypatch.setattr(observation, "WARNING_INTERVAL_S", float("inf"))
    llm, _ = start()
    for token_id in range(4):
        ask(llm, [token_id])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "a step of 1 query took" in record.getMessage()
    assert "more" not in record.getMessage()
    assert "max_batch_size" not in record.getMessage()
    monkeypatch.setattr(observation, "WARNING_INTERVAL_S", 0.0)
    ask(llm, [4])
    assert "; 3 more since the last warning" in caplog.records[1].getMessage()
    ask(llm, [5, 6], [7])
    assert "a step of 2 queries took" in caplog.records[2].getMessage()
    assert "A smaller max_batch_size" in caplog.records[2].getMessage()


@pytest.mark.parametrize(("limit", "warnings"), [(20, 2), (50, 2), (51, 0)])
def test_many_steps_in_a_row_that_complete_no_query_are_a_warning(
    start, caplog, monkeypatch, limit, warnings
):
    class Late(ScriptedEngine):
        empty_steps = 0

        def step(self):
            if self.empty_steps < 50:
                self.empty_steps += 1
                return []
            self.empty_steps = 0
            return super().step()

    caplog.set_level(logging.WARNING, "genlm.batches")
    monkeypatch.setattr(observation, "EMPTY_STEPS", limit)
    llm, _ = start(Late())
    for token_id in range(2):
        [row] = ask(llm, [token_id])
        torch.testing.assert_close(row, oracle_row([token_id], None, 16))
    assert llm.statistics().batch_sizes == {1: 2}
    assert len(caplog.records) == warnings
    assert caplog.text.count(f"{limit} steps in a row completed none of 1 queries") == warnings


def test_each_batch_is_a_span_with_attributes_and_a_parent_of_the_engines_spans(start, spans):
    engine = CountingEngine(poison=[7])
    tracer = trace.get_tracer_provider().get_tracer("an engine")
    engine.during_evaluate = lambda: tracer.start_span("forward").end()
    llm, _ = start(engine)
    ask(llm, [1, 2], [3])
    forward, batch = spans.get_finished_spans()
    assert batch.name == "genlm.batch"
    assert forward.parent.span_id == batch.context.span_id
    assert dict(batch.attributes) == {
        "genlm.engine": f"genlm-{llm.name}",
        "genlm.batch.queries": 2,
        "genlm.batch.finished": 2,
        "genlm.batch.failed": 0,
        "genlm.batch.tokens_computed": 3,
    }
    ask(llm, [7])
    assert spans.get_finished_spans()[-1].attributes["genlm.batch.failed"] == 1


def test_a_tracer_provider_that_is_set_after_the_model_was_loaded_counts(start, monkeypatch):
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    llm, _ = start()
    ask(llm, [1])  # without a provider: nothing to record
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    ask(llm, [2])
    assert [span.name for span in exporter.get_finished_spans()] == ["genlm.batch"]


def test_opentelemetry_is_not_needed_and_not_imported(start, records, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import of it fails
    llm, _ = start()
    torch.testing.assert_close(llm.next_token_logprobs_sync([3]), oracle_row([3], None, 16))
    assert "step of 1 queries" in records.text
