"""An engine over a prefix tree: which queries it accepts, how it is chosen, what it reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm import (
    Capability,
    ModelLoadError,
    Query,
    TokenIdError,
    UnknownAdapterError,
    UnsupportedCapabilityError,
    prefix,
)
from genlm.prefix import (
    ForwardResult,
    PrefixEngine,
    PrefixRows,
    SelfTest,
    ServeOptions,
    TokenBatch,
    UnsupportedModelError,
    choose_path,
)

from .test_rows import SIZE, TOKEN_BYTES, Alone, assert_right, expected, serve
from .test_scoring import right_scores

PATHS = ("tree", "alone")


class Adapters(prefix.ModelAdapters[Path]):
    """Adapters by name; `active` is the one that is applied."""

    active: str | None = None

    def _load(self, name: str, path: Path) -> Path:
        return path

    @contextmanager
    def activate(self, name: str) -> Iterator[None]:
        self.active = name
        try:
            yield
        finally:
            self.active = None


class Engine(PrefixEngine):
    backend = "toy"

    def __init__(
        self,
        *,
        error: float = 0,
        hints: Mapping[Capability, str] | None = None,
        **options: Any,
    ) -> None:
        self.vocabulary = Alone().vocabulary
        self.built: list[PrefixRows] = []
        self.tested: list[PrefixRows] = []

        def build(budget: int | None) -> PrefixRows:
            if error == float("inf"):
                raise UnsupportedModelError("it has no layers")
            rows, self.model = serve(300 if budget is None else budget // TOKEN_BYTES)
            self.built.append(rows)
            return rows

        def self_test(path: PrefixRows) -> float:
            self.tested.append(path)
            if error:
                compute = path.rows
                path.rows = lambda *args: compute(*args) + error  # type: ignore[method-assign]
            return SelfTest(
                range(SIZE), Alone(), tolerance=1e-3, max_context=None
            ).largest_error(path)

        choice = choose_path(
            "Toy",
            {"tree": build},
            Alone(),
            options=ServeOptions(paths=PATHS, **options),
            self_test=self_test,
            logger=logging.getLogger("toy"),
        )
        self.loaded = Adapters()
        self.serve(choice, self.loaded, embedding_rows=SIZE - 1, hints=hints)

    def model_statistics(self) -> Mapping[str, int | float | str]:
        return {"model": "Toy"}


def test_rows_are_right_and_each_step_has_one_adapter() -> None:
    engine = Engine()
    engine.add_adapter("red", "folder")
    queries = [Query(i, (1, 2, i), name) for i, name in enumerate([None, "red", None, "red"])]
    for query in queries:
        engine.submit(query)
    for adapter, answered in ((None, [0, 2]), ("red", [1, 3])):
        completions = engine.step()
        assert [completion.query_id for completion in completions] == answered
        for completion in completions:
            row = expected(adapter, queries[completion.query_id].token_ids)
            torch.testing.assert_close(completion.result, row, rtol=0, atol=1e-6)
    assert engine.adapters == ("red",)
    assert engine.loaded.active is None


def test_the_adapter_of_a_query_is_active_in_its_passes() -> None:
    engine = Engine()
    engine.add_adapter("red", "folder")
    path, adapters = engine._prefix_cache(), []
    forward = path.forward

    def recorded(batch: TokenBatch) -> ForwardResult:
        adapters.append((batch.adapter, engine.loaded.active))
        return forward(batch)

    path.forward = recorded
    for number, name in enumerate((None, "red")):
        engine.submit(Query(2 * number, (1, 2), name))
        engine.submit(Query(2 * number + 1, (2, 1), name, targets=(3,)))
        engine.cache_prefix((3, 4), name)
    while engine.step():
        pass
    assert (
        adapters == [(None, None), ("red", "red")] + [(None, None)] * 2 + [("red", "red")] * 2
    )


def test_queries_that_cannot_be_answered_are_refused_before_a_step() -> None:
    engine = Engine()
    with pytest.raises(UnknownAdapterError):
        engine.submit(Query(0, (1,), "red"))
    with pytest.raises(TokenIdError, match=f"{SIZE - 1}"):
        engine.submit(Query(0, (1, SIZE - 1)))
    with pytest.raises(TokenIdError):
        engine.cache_prefix((SIZE - 1,), None)
    assert engine.step() == []


def test_the_faster_path_is_chosen_if_its_rows_are_right() -> None:
    figures = Engine().statistics()
    assert (figures["execution_path"], figures["execution_path_reason"]) == (
        "tree",
        "the fastest",
    )
    assert figures["self_test_error"] == 0
    assert figures["kv_tokens"] == 0
    assert "self_test_error" not in Engine(self_test=False, error=1).statistics()


def test_batches_of_the_self_test_are_one_pass_with_any_budget() -> None:
    engine = Engine(kv_budget_bytes=5 * TOKEN_BYTES)
    [tested] = engine.tested
    assert [rows is tested for rows in engine.built] == [False, True, False]
    assert tested.statistics()["forwards"] == 3
    assert tested.statistics()["contexts_without_cache"] == 0
    assert engine._prefix_cache() is engine.built[-1]
    engine = Engine()
    assert engine.built == engine.tested


@pytest.mark.parametrize(
    ("error", "reason"), [(float("inf"), "no layers"), (2e-3, r"off by 2\.0e-03, more than 1")]
)
def test_a_path_that_is_unsupported_or_wrong_is_refused(error: float, reason: str) -> None:
    engine = Engine(error=error)
    assert engine.statistics()["execution_path"] == "alone"
    with pytest.raises(UnsupportedCapabilityError, match=f"has no cache .not tree: .*{reason}"):
        engine.clear_prefix_cache()
    assert Capability.PREFIX_CACHE not in engine.capabilities
    with pytest.raises(
        ModelLoadError, match=f"execution_path='tree' cannot serve Toy: .*{reason}"
    ):
        Engine(error=error, execution_path="tree")


def test_the_path_without_a_cache_can_be_requested() -> None:
    figures = Engine(execution_path="alone").statistics()
    assert (figures["execution_path"], figures["execution_path_reason"]) == (
        "alone",
        "requested",
    )


def test_prefixes_are_kept_until_they_are_cleared() -> None:
    engine = Engine()
    engine.cache_prefix((1, 2, 3), None)
    assert engine.statistics()["kv_tokens"] == 3
    assert_right(engine._prefix_cache(), None, [(1, 2, 3, 4)])
    engine.clear_prefix_cache()
    assert engine.statistics()["kv_tokens"] == 0


def test_a_released_context_is_evicted_before_others() -> None:
    engine = Engine(kv_budget_bytes=6 * TOKEN_BYTES)
    contexts = [Query(0, (1, 2)), Query(1, (2, 3)), Query(2, (3, 4))]
    engine.evaluate(contexts)
    engine.release_context(None, contexts[1].sequence.key)
    engine.evaluate([Query(3, (5, 5))])
    for context, count in ((contexts[0], 1), (contexts[2], 1), (contexts[1], 2)):
        before = engine.statistics()["tokens_computed"]
        engine.evaluate([context])  # the last token of a cached context, or all tokens
        assert engine.statistics()["tokens_computed"] == before + count


def test_a_model_without_adapters_says_why() -> None:
    engine = Engine(hints={Capability.LORA: "install lora"})
    assert Capability.LORA not in engine.capabilities
    with pytest.raises(UnsupportedCapabilityError, match="install lora"):
        engine.add_adapter("red", "folder")


def test_an_engine_without_adapters_refuses_them() -> None:
    engine = Engine()
    engine.serve(engine._choice, embedding_rows=SIZE - 1)
    assert engine.capabilities == {Capability.PREFIX_CACHE, Capability.SCORE}
    assert engine.adapters == ()
    with pytest.raises(UnsupportedCapabilityError, match="toy has no adapters"):
        engine.add_adapter("red", "folder")
    with pytest.raises(UnknownAdapterError):
        engine.submit(Query(0, (1,), "red"))


def test_statistics_outlive_the_engine() -> None:
    engine = Engine()
    engine.evaluate([Query(0, (1, 2))])
    engine.close()
    assert engine.statistics()["tokens_evaluated"] == 2
    assert engine.statistics()["model"] == "Toy"
    assert engine.statistics()["execution_path"] == "tree"


def test_an_error_of_statistics_is_not_that_of_a_closed_engine() -> None:
    class Wrong(Engine):
        def model_statistics(self) -> Mapping[str, int | float | str]:
            raise AttributeError("no dtype")

    with pytest.raises(AttributeError, match="no dtype"):
        Wrong().statistics()


def test_each_step_answers_scores_or_rows_of_one_adapter() -> None:
    engine = Engine()
    assert Capability.SCORE in engine.capabilities
    engine.add_adapter("red", "folder")
    queries = [
        Query(0, (1, 2, 3, 4, 5, 0), targets=(5, 0, 6)),
        Query(1, (1, 2, 3)),
        Query(2, (1, 2, 3, 4), "red", targets=(6,)),
        Query(3, (1, 2, 3, 5), targets=(3,)),
        Query(4, (1, 2)),
    ]
    for query in queries:
        engine.submit(query)
    for answered in ([0, 3], [1, 4], [2]):
        completions = engine.step()
        assert [completion.query_id for completion in completions] == answered
        for completion in completions:
            query = queries[completion.query_id]
            if query.targets:
                wanted = right_scores(query.adapter, query)
                torch.testing.assert_close(completion.result.logprobs, wanted.logprobs)
                assert torch.equal(completion.result.is_top, wanted.is_top)
            else:
                torch.testing.assert_close(completion.result, expected(None, query.token_ids))
    assert engine.loaded.active is None
    assert engine.statistics()["tokens_evaluated"] == sum(map(len, queries))


def test_scores_are_refused_where_the_model_lacks_them() -> None:
    engine = Engine(hints={Capability.SCORE: "its hidden states cannot be read"})
    assert Capability.SCORE not in engine.capabilities
    with pytest.raises(UnsupportedCapabilityError, match=r"'toy' .*; its hidden states"):
        engine.submit(Query(0, (1, 2), targets=(3,)))
    engine.submit(Query(1, (1, 2)))
    assert [completion.query_id for completion in engine.step()] == [1]


def test_new_weights_free_all_cached_tokens() -> None:
    engine, loaded = Engine(), []
    with pytest.raises(UnsupportedCapabilityError):
        engine.update_weights({"n": 1})

    def load(weights: Mapping[str, Any]) -> None:
        loaded.append(weights)
        if "n" not in weights:
            raise ValueError("n is missing")

    engine.serve(engine._choice, engine.loaded, embedding_rows=SIZE, load_weights=load)
    assert Capability.WEIGHTS in engine.capabilities
    for weights in ({"n": 1}, None, {}):
        engine.cache_prefix((1, 2, 3), None)
        with pytest.raises(ValueError, match="missing") if weights == {} else nullcontext():
            engine.update_weights(weights)
        assert engine.statistics()["kv_tokens"] == 0
    assert loaded == [{"n": 1}, {}]
    engine.serve(
        engine._choice,
        embedding_rows=SIZE,
        hints={Capability.WEIGHTS: "it is offloaded"},
        load_weights=load,
    )
    with pytest.raises(UnsupportedCapabilityError, match="it is offloaded"):
        engine.update_weights(None)


def test_ids_of_queries_that_no_model_has_checked_are_checked() -> None:
    engine = Engine()
    engine.serve(engine._choice, embedding_rows=SIZE)  # embeds all ids
    with pytest.raises(TokenIdError):
        engine.submit(Query(0, (1, SIZE)))
    engine.submit(Query(1, (1, SIZE - 1)))


def test_an_engine_without_a_cache_has_no_state_of_populations() -> None:
    engine = Engine(execution_path="alone")
    assert engine.scored_columns == 0
    assert Capability.PREFIX_CACHE not in engine.capabilities
    engine.release_context(None, b"key")
    for call in (engine.clear_prefix_cache, lambda: engine.cache_prefix((1, 2), None)):
        with pytest.raises(UnsupportedCapabilityError, match=r"no cache \(requested\)"):
            call()
