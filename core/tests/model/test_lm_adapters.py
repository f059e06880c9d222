"""Adapters are chosen per request, per view or by default, and never mixed up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from scripted import TIMEOUT_S, ScriptedEngine, oracle_row

from genlm.core.base.errors import (
    AdapterError,
    AdapterLimitError,
    EngineClosedError,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm.core.engine.engine import Capability
from genlm.core.model.lm import AsyncLM
from genlm.core.queries.query import Completion, Query

VOCAB_SIZE = 16
MakeModel = Callable[..., AsyncLM]


def expected(token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
    return oracle_row(token_ids, adapter, VOCAB_SIZE)


class Loaded:
    """An engine and its model with adapters "a" and "b" loaded."""

    def __init__(self, make_model: MakeModel) -> None:
        self.engine = ScriptedEngine(VOCAB_SIZE)
        self.llm = make_model(self.engine, name="scripted")
        self.llm.load_lora("folder/a", "a")
        self.llm.load_lora(Path("folder/b"), "b")


@pytest.fixture
def loaded(make_model: MakeModel) -> Loaded:
    return Loaded(make_model)


# -- choosing -------------------------------------------------------------------------


def test_one_batch_mixes_adapters_and_the_base(loaded: Loaded) -> None:
    names = ["a", None, "b", "a"]

    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(
            *(loaded.llm.next_token_logprobs([1, 2], lora_name=name) for name in names)
        )

    for _ in range(2):  # from the engine, then from the cache
        for row, name in zip(asyncio.run(main()), names, strict=True):
            assert torch.equal(row, expected([1, 2], name))
    assert loaded.engine.batches == [[(1, 2)] * 3]


def test_a_context_has_the_adapter_of_its_requests(loaded: Loaded) -> None:
    llm, context = loaded.llm, loaded.llm.context([1, 2], lora_name="a")
    for name in (None, "a"):
        row = llm.next_token_logprobs_sync(context, lora_name=name)
        assert torch.equal(row, expected([1, 2], "a"))
    with pytest.raises(ValueError, match=r"'b' .* which has the adapter 'a'"):
        llm.next_token_logprobs_sync(context, lora_name="b")
    with pytest.raises(ValueError, match=r"'b' .* which has the adapter 'a'"):
        llm.population([context], lora_name="b")
    with pytest.raises(ValueError, match=r"'b' .* which has the adapter None"):
        llm.next_token_logprobs_sync(llm.context([1]), lora_name="b")


def test_every_method_takes_an_adapter(loaded: Loaded) -> None:
    llm = loaded.llm
    rows = [
        asyncio.run(llm.next_token_logprobs([3], lora_name="a")),
        asyncio.run(llm.next_token_logprobs([3], lora_name="a", use_cache=False)),
        asyncio.run(llm.batch_next_token_logprobs([[3]], lora_name="a"))[0],
        llm.next_token_logprobs_sync([3], lora_name="a"),
        llm.batch_next_token_logprobs_sync([[3]], lora_name="a")[0],
    ]
    assert all(torch.equal(row, expected([3], "a")) for row in rows)
    best = int(expected([3], "a").argmax())
    assert asyncio.run(llm.sample([3], 1, temperature=0, lora_name="a")) == [best]


def test_a_view_has_its_own_default_and_shares_everything_else(loaded: Loaded) -> None:
    llm = loaded.llm
    view, base = llm.with_lora("a"), llm.with_lora("a").with_lora(None)
    assert torch.equal(view.next_token_logprobs_sync([1]), expected([1], "a"))
    assert torch.equal(view.next_token_logprobs_sync([1], lora_name="b"), expected([1], "b"))
    assert torch.equal(base.next_token_logprobs_sync([1]), expected([1], None))
    assert torch.equal(llm.next_token_logprobs_sync([1]), expected([1], None))
    assert view.statistics() == llm.statistics()
    assert llm.statistics().cache_hits == 1
    view.load_lora("folder/c", "c")
    assert torch.equal(llm.next_token_logprobs_sync([1], lora_name="c"), expected([1], "c"))
    view.close()
    assert loaded.engine.closed
    with pytest.raises(EngineClosedError):
        llm.next_token_logprobs_sync([1])


def test_requests_of_views_are_in_one_batch(loaded: Loaded) -> None:
    views = [loaded.llm.with_lora(name) for name in ("a", "b", None)]

    async def main() -> list[torch.Tensor]:
        return await asyncio.gather(*(view.next_token_logprobs([5]) for view in views))

    for row, name in zip(asyncio.run(main()), ("a", "b", None), strict=True):
        assert torch.equal(row, expected([5], name))
    assert loaded.engine.batches == [[(5,)] * 3]


# -- loading --------------------------------------------------------------------------


def test_the_engine_gets_the_name_and_the_path_as_given(loaded: Loaded) -> None:
    assert loaded.engine.adapters == {"a": "folder/a", "b": "folder/b"}


def test_adapters_that_a_model_came_with_can_be_asked_for(make_model: MakeModel) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    engine.adapters["own"] = ""
    llm = make_model(engine, name="scripted")
    row = llm.next_token_logprobs_sync([1], lora_name="own")
    assert torch.equal(row, expected([1], "own"))
    with pytest.raises(AdapterError, match="'own', which is already loaded from 'the model"):
        llm.load_lora("folder/own", "own")


def test_names_of_adapters_are_checked(loaded: Loaded) -> None:
    with pytest.raises(AdapterError, match="under an empty name"):
        loaded.llm.load_lora("folder/c", "")
    name: Any = 3
    for call in (
        lambda: loaded.llm.load_lora("folder/c", name),
        lambda: loaded.llm.next_token_logprobs_sync([1], lora_name=name),
    ):
        with pytest.raises(TypeError, match="name is a string; found 3"):
            call()
    assert [*loaded.engine.adapters] == ["a", "b"]


def test_another_folder_under_a_name_in_use_is_refused(loaded: Loaded) -> None:
    with pytest.raises(AdapterError, match=r"'folder/b' as adapter 'a'.*folder/a"):
        loaded.llm.load_lora("folder/b", "a")
    assert loaded.engine.adapters["a"] == "folder/a"


@pytest.mark.parametrize("again", ["folder/a", "folder/a/", "./folder/a", "folder/b/../a"])
def test_loading_a_folder_again_does_nothing_however_it_is_spelt(
    loaded: Loaded, again: str
) -> None:
    loaded.engine.adapters.clear()
    loaded.llm.load_lora(again, "a")
    loaded.llm.load_lora(os.path.realpath(again), "a")
    assert loaded.engine.adapters == {}


def test_an_adapter_that_cannot_be_loaded_leaves_its_name_free(make_model: MakeModel) -> None:
    class PickyEngine(ScriptedEngine):
        def add_adapter(self, name: str, path: str) -> None:
            if path == "bad":
                raise AdapterError("no adapter in 'bad'")
            super().add_adapter(name, path)

    llm = make_model(PickyEngine(VOCAB_SIZE))
    with pytest.raises(AdapterError, match="no adapter in 'bad'"):
        llm.load_lora("bad", "a")
    with pytest.raises(UnknownAdapterError):
        llm.next_token_logprobs_sync([1], lora_name="a")
    llm.load_lora("good", "a")
    assert torch.equal(llm.next_token_logprobs_sync([1], lora_name="a"), expected([1], "a"))


class AnnouncedPath:
    """A path that tells when it is looked at."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen = threading.Event()

    def __fspath__(self) -> str:
        self.seen.set()
        return self.path


def test_threads_that_load_one_name_at_once_load_it_once(make_model: MakeModel) -> None:
    class SlowEngine(ScriptedEngine):
        calls = 0
        may_go_on = threading.Event()

        def add_adapter(self, name: str, path: str) -> None:
            self.calls += 1
            assert self.may_go_on.wait(TIMEOUT_S)
            super().add_adapter(name, path)

    engine = SlowEngine(VOCAB_SIZE)
    llm = make_model(engine)
    paths = [AnnouncedPath("folder") for _ in range(4)]
    with ThreadPoolExecutor(5) as threads:
        loads = [threads.submit(llm.load_lora, path, "a") for path in paths]
        other = AnnouncedPath("elsewhere")
        for path in paths:
            assert path.seen.wait(TIMEOUT_S)
        conflicting = threads.submit(llm.load_lora, other, "b")
        assert other.seen.wait(TIMEOUT_S)
        engine.may_go_on.set()
        for load in [*loads, conflicting]:
            load.result(TIMEOUT_S)
    assert engine.calls == 2
    assert engine.adapters == {"a": "folder", "b": "elsewhere"}


# -- refusing -------------------------------------------------------------------------

ASKING: dict[str, Callable[[AsyncLM], Any]] = {
    "row": lambda llm: asyncio.run(llm.next_token_logprobs([1], lora_name="c")),
    "uncached": lambda llm: asyncio.run(
        llm.next_token_logprobs([1], lora_name="c", use_cache=False)
    ),
    "batch": lambda llm: asyncio.run(llm.batch_next_token_logprobs([[1]], lora_name="c")),
    "sync": lambda llm: llm.next_token_logprobs_sync([1], lora_name="c"),
    "batch_sync": lambda llm: llm.batch_next_token_logprobs_sync([[1]], lora_name="c"),
    "sample": lambda llm: asyncio.run(llm.sample([1], 1, lora_name="c")),
    "with_lora": lambda llm: llm.with_lora("c"),
}
asking = pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)


@asking
def test_an_unknown_adapter_is_an_error_that_lists_the_known_ones(
    loaded: Loaded, ask: Callable[[AsyncLM], Any]
) -> None:
    with pytest.raises(UnknownAdapterError) as unknown:
        ask(loaded.llm)
    assert (unknown.value.name, unknown.value.loaded) == ("c", ("a", "b"))
    assert loaded.engine.batches == []
    assert torch.equal(loaded.llm.next_token_logprobs_sync([1]), expected([1], None))


class PlainEngine(ScriptedEngine):
    capabilities = frozenset()


@pytest.mark.parametrize(
    "ask",
    [*ASKING.values(), lambda llm: llm.load_lora("folder", "c")],
    ids=[*ASKING, "load_lora"],
)
def test_an_engine_without_adapters_says_so(
    make_model: MakeModel, ask: Callable[[AsyncLM], Any]
) -> None:
    llm = make_model(PlainEngine(VOCAB_SIZE), name="plain")
    with pytest.raises(
        UnsupportedCapabilityError, match="'plain' does not support 'lora'"
    ) as error:
        ask(llm)
    assert error.value.capability == Capability.LORA
    llm.with_lora(None).next_token_logprobs_sync([1])


def test_an_engine_may_say_how_it_gets_a_capability(make_model: MakeModel) -> None:
    class Hinting(PlainEngine):
        capability_hints: ClassVar = {Capability.LORA: "load the model with lora=True"}

    llm = make_model(Hinting(VOCAB_SIZE), name="hinting")
    with pytest.raises(
        UnsupportedCapabilityError,
        match="'hinting' does not support 'lora'; load the model with",
    ):
        llm.load_lora("folder", "c")
    with pytest.raises(
        UnsupportedCapabilityError, match="'prefix_cache'; `genlm plugins` lists"
    ):
        llm.clear_kv_cache()


# -- removing -------------------------------------------------------------------------


class RemovingEngine(ScriptedEngine):
    """Answers as `ScriptedEngine`; refuses queries of adapters that it does not have."""

    def submit(self, query: Query) -> None:
        if query.adapter is not None and query.adapter not in self.adapters:
            raise UnknownAdapterError(query.adapter, self.adapters)
        super().submit(query)

    def remove_adapter(self, name: str) -> None:
        del self.adapters[name]


@pytest.fixture
def removing(make_model: MakeModel) -> AsyncLM:
    llm = make_model(RemovingEngine(VOCAB_SIZE), name="removing")
    llm.load_lora("folder/a", "a")
    llm.load_lora("folder/b", "b")
    return llm


def engine_adapters(llm: AsyncLM) -> dict[str, str]:
    """What the engine has loaded, once its thread has done what was asked before."""
    return dict(llm._scheduler.run(lambda engine: engine.adapters))


def test_the_names_of_adapters_are_listed(removing: AsyncLM) -> None:
    assert removing.lora_names == removing.with_lora("a").lora_names == ("a", "b")
    assert (removing.lora_name, removing.with_lora("a").lora_name) == (None, "a")


@asking
def test_a_removed_adapter_is_unknown(removing: AsyncLM, ask: Callable[[AsyncLM], Any]) -> None:
    removing.load_lora("folder/c", "c")
    ask(removing)
    removing.unload_lora("c")
    with pytest.raises(UnknownAdapterError):
        ask(removing)
    assert removing.lora_names == tuple(engine_adapters(removing)) == ("a", "b")
    assert torch.equal(
        removing.next_token_logprobs_sync([1], lora_name="a"), expected([1], "a")
    )


def test_a_default_adapter_that_is_removed_is_unknown(removing: AsyncLM) -> None:
    view = removing.with_lora("a")
    removing.unload_lora("a")
    with pytest.raises(UnknownAdapterError):
        view.next_token_logprobs_sync([1])
    row = view.with_lora(None).next_token_logprobs_sync([1])
    assert torch.equal(row, expected([1], None))


def test_the_rows_of_a_removed_adapter_leave_the_output_cache(removing: AsyncLM) -> None:
    for name in ("a", "b"):
        removing.next_token_logprobs_sync([1], lora_name=name)
    removing.unload_lora("a")
    assert list(engine_adapters(removing)) == ["b"]
    assert removing.statistics().cache_entries == 1
    assert removing.cached_logprobs([1], lora_name="b") is not None


def test_a_name_that_is_given_again_is_another_adapter_of_the_engine(removing: AsyncLM) -> None:
    removing.next_token_logprobs_sync([1], lora_name="a")
    removing.unload_lora("a")
    removing.load_lora("folder/new", "a")
    assert engine_adapters(removing) == {"b": "folder/b", "a@2": "folder/new"}
    row = removing.next_token_logprobs_sync([1], lora_name="a")
    assert torch.equal(row, expected([1], "a@2"))
    assert removing.lora_names == ("b", "a")


def test_engine_names_with_numbers_are_those_of_no_other_adapter(removing: AsyncLM) -> None:
    removing.load_lora("folder/number", "a@2")
    removing.unload_lora("a")
    removing.load_lora("folder/new", "a")
    removing.load_lora("folder/c", "c")
    removing.load_lora("folder/replaced", "c", replace=True)
    names = {"b": "folder/b", "a@2": "folder/number", "a@3": "folder/new"}
    assert engine_adapters(removing) == names | {"c@5": "folder/replaced"}
    row = removing.next_token_logprobs_sync([1], lora_name="c")
    assert torch.equal(row, expected([1], "c@5"))


@pytest.mark.parametrize("name", ["a", "a@{}", "step {}"])
def test_engine_names_of_removed_adapters_differ_without_being_stored(
    make_model: MakeModel, name: str
) -> None:
    names = []

    class Recording(RemovingEngine):
        def add_adapter(self, name: str, path: str) -> None:
            super().add_adapter(name, path)
            names.append(name)

    llm = make_model(Recording(VOCAB_SIZE))
    llm.load_lora("folder/a", "a")

    def stored() -> int:
        values = vars(llm._requests.adapters).values()
        return sum(len(value) for value in values if isinstance(value, Sized))

    sizes = []
    for step in range(20):
        llm.load_lora(f"folder/{step}", name.format(step), replace=True)
        llm.unload_lora(name.format(step))
        sizes.append(stored())
    assert len(names) == len(set(names)) == 21
    assert max(sizes) == sizes[1]


def test_an_adapter_that_is_removed_while_it_is_replaced_is_freed_once(
    make_model: MakeModel,
) -> None:
    removed = []

    class Slow(RemovingEngine):
        def add_adapter(self, name: str, path: str) -> None:
            super().add_adapter(name, path)
            if name == "a@2":
                llm.unload_lora("a")

        def remove_adapter(self, name: str) -> None:
            removed.append(name)
            super().remove_adapter(name)

    llm = make_model(Slow(VOCAB_SIZE))
    llm.load_lora("folder/a", "a")
    llm.load_lora("folder/new", "a", replace=True)
    assert engine_adapters(llm) == {"a@2": "folder/new"}
    assert removed == ["a"]


class FullEngine(RemovingEngine):
    """Has room for one adapter and cannot load from the folder "bad"."""

    def add_adapter(self, name: str, path: str) -> None:
        if self.adapters:
            raise AdapterLimitError("1 adapter is loaded")
        if path == "bad":
            raise AdapterError("cannot be loaded")
        super().add_adapter(name, path)


def test_an_adapter_is_replaced_in_an_engine_without_room(make_model: MakeModel) -> None:
    llm = make_model(FullEngine(VOCAB_SIZE))
    llm.load_lora("folder/a", "a")
    before = llm.next_token_logprobs_sync([1], lora_name="a")
    with pytest.raises(AdapterLimitError):
        llm.load_lora("folder/b", "b", replace=True)
    llm.load_lora("folder/new", "a", replace=True)
    assert engine_adapters(llm) == {"a@2": "folder/new"}
    assert llm.lora_names == ("a",)
    assert not torch.equal(llm.next_token_logprobs_sync([1], lora_name="a"), before)
    with pytest.raises(AdapterError, match="cannot be loaded"):
        llm.load_lora("bad", "a", replace=True)
    assert llm.lora_names == ()
    llm.load_lora("folder/a", "a")


def test_an_adapter_that_cannot_be_removed_is_not_replaced_in_an_engine_without_room(
    make_model: MakeModel,
) -> None:
    class WithoutRemoval(ScriptedEngine):
        def add_adapter(self, name: str, path: str) -> None:
            if self.adapters:
                raise AdapterLimitError("1 adapter is loaded")
            super().add_adapter(name, path)

    llm = make_model(WithoutRemoval(VOCAB_SIZE))
    llm.load_lora("folder/a", "a")
    with pytest.raises(AdapterLimitError):
        llm.load_lora("folder/new", "a", replace=True)
    assert torch.equal(llm.next_token_logprobs_sync([1], lora_name="a"), expected([1], "a"))

    engine = FullEngine(VOCAB_SIZE)
    engine.adapters["own"] = ""
    llm = make_model(engine)
    with pytest.raises(AdapterLimitError):
        llm.load_lora("folder/new", "own", replace=True)
    assert torch.equal(llm.next_token_logprobs_sync([1], lora_name="own"), expected([1], "own"))


def test_adapters_are_replaced_in_an_engine_that_cannot_remove_them(loaded: Loaded) -> None:
    loaded.llm.load_lora("folder/new", "a", replace=True)
    names = {"a": "folder/a", "b": "folder/b", "a@2": "folder/new"}
    assert engine_adapters(loaded.llm) == names
    row = loaded.llm.next_token_logprobs_sync([1], lora_name="a")
    assert torch.equal(row, expected([1], "a@2"))


def test_an_adapter_that_a_model_came_with_stays_in_the_engine(make_model: MakeModel) -> None:
    engine = RemovingEngine(VOCAB_SIZE)
    engine.adapters["own"] = ""
    llm = make_model(engine)
    llm.unload_lora("own")
    assert llm.lora_names == ()
    assert engine_adapters(llm) == {"own": ""}


def test_an_adapter_in_use_is_not_replaced_in_an_engine_without_room(
    make_model: MakeModel,
) -> None:
    class Waiting(FullEngine):
        submitted, may_go_on = threading.Event(), threading.Event()

        def submit(self, query: Query) -> None:
            super().submit(query)
            self.submitted.set()

        def step(self) -> list[Completion]:
            return super().step() if self.may_go_on.is_set() else []

    engine = Waiting(VOCAB_SIZE)
    llm = make_model(engine)
    llm.load_lora("folder/a", "a")
    with ThreadPoolExecutor(1) as threads:
        row = threads.submit(llm.next_token_logprobs_sync, [1], lora_name="a")
        assert engine.submitted.wait(TIMEOUT_S)
        message = "'a' cannot be replaced while requests use it.*wait.*The engine: 1 adapter is"
        with pytest.raises(AdapterLimitError, match=message):
            llm.load_lora("folder/new", "a", replace=True)
        engine.may_go_on.set()
        row.result(TIMEOUT_S)
    assert engine_adapters(llm) == {"a": "folder/a"}


def test_a_context_of_a_replaced_adapter_says_so(removing: AsyncLM) -> None:
    context = removing.context([1], lora_name="a")
    removing.load_lora("folder/new", "a", replace=True)
    with pytest.raises(UnknownAdapterError, match="'a' of this context was unloaded, and"):
        context.next_token_logprobs_sync()


def test_a_context_of_an_adapter_that_was_loaded_again_says_so(removing: AsyncLM) -> None:
    context = removing.context([1], lora_name="a")
    removing.unload_lora("a")
    with pytest.raises(UnknownAdapterError, match="no adapter named 'a'"):
        context.next_token_logprobs_sync()
    removing.load_lora("folder/a", "a")
    message = "was unloaded, and the name belongs to an adapter that was loaded later"
    with pytest.raises(UnknownAdapterError, match=message):
        context.next_token_logprobs_sync()


def test_an_adapter_is_replaced_if_that_is_asked_for(removing: AsyncLM) -> None:
    removing.load_lora("folder/new", "a", replace=True)
    assert engine_adapters(removing) == {"b": "folder/b", "a@2": "folder/new"}
    assert removing.lora_names == ("a", "b")


def test_an_adapter_whose_files_have_changed_is_not_taken_for_the_loaded_one(
    removing: AsyncLM, tmp_path: Path
) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    removing.load_lora(tmp_path, "trained")
    (tmp_path / "optimizer.pt").write_bytes(b"state")  # a file of the trainer
    removing.load_lora(tmp_path, "trained")
    weights.write_bytes(b"other")
    os.utime(weights, ns=(0, 1))
    with pytest.raises(AdapterError, match=r"files of this folder have changed.*replace=True"):
        removing.load_lora(tmp_path, "trained")
    assert "trained@2" not in engine_adapters(removing)
    removing.load_lora(tmp_path, "trained", replace=True)
    assert "trained@2" in engine_adapters(removing)
    removing.load_lora(tmp_path, "trained")
    assert "trained@3" not in engine_adapters(removing)


def test_requests_under_way_are_answered_with_the_adapter(make_model: MakeModel) -> None:
    class Held(RemovingEngine):
        entered, may_go_on = threading.Event(), threading.Event()

        def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
            self.entered.set()
            assert self.may_go_on.wait(TIMEOUT_S)
            return super().evaluate(queries)

    engine = Held(VOCAB_SIZE)
    llm = make_model(engine)
    llm.load_lora("folder/a", "a")

    async def main() -> list[torch.Tensor]:
        first = asyncio.ensure_future(llm.next_token_logprobs([1]))
        assert await asyncio.to_thread(engine.entered.wait, TIMEOUT_S)
        in_inbox = asyncio.ensure_future(llm.next_token_logprobs([2], lora_name="a"))
        await asyncio.sleep(0)
        llm.unload_lora("a")
        engine.may_go_on.set()
        return [await first, await in_inbox]

    base, adapted = asyncio.run(main())
    assert torch.equal(base, expected([1], None))
    assert torch.equal(adapted, expected([2], "a"))
    assert engine_adapters(llm) == {}
    assert llm.statistics().cache_entries == 1


def test_a_removal_waits_no_longer_than_a_cancelled_request(make_model: MakeModel) -> None:
    engine = RemovingEngine(VOCAB_SIZE)
    llm = make_model(engine)
    llm.load_lora("folder/a", "a")

    async def main() -> None:
        request = asyncio.ensure_future(llm.next_token_logprobs([1], lora_name="a"))
        await asyncio.sleep(0)
        llm.unload_lora("a")
        assert engine_adapters(llm) == {"a": "folder/a"}
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    asyncio.run(main())
    assert engine_adapters(llm) == {}


def test_of_an_adapter_that_the_model_came_with_only_the_name_is_removed(
    make_model: MakeModel,
) -> None:
    engine = ScriptedEngine(VOCAB_SIZE)
    engine.adapters["own"] = ""
    llm = make_model(engine)
    llm.unload_lora("own")
    assert (llm.lora_names, engine.adapters) == ((), {"own": ""})
    llm.load_lora("folder", "own")
    assert engine.adapters == {"own": "", "own@2": "folder"}


def test_an_engine_that_cannot_remove_adapters_says_so(loaded: Loaded) -> None:
    with pytest.raises(
        UnsupportedCapabilityError, match=r"'unload_lora'; .* lacks the method remove_adapter"
    ):
        loaded.llm.unload_lora("a")
    assert loaded.llm.lora_names == ("a", "b")


def test_removing_an_unknown_adapter_is_an_error(removing: AsyncLM) -> None:
    with pytest.raises(UnknownAdapterError):
        removing.unload_lora("c")
    with pytest.raises(TypeError):
        removing.unload_lora(3)


def test_an_adapter_that_another_thread_removes_meanwhile_is_unknown(
    removing: AsyncLM,
) -> None:
    class RemovedOnceFound(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            return self.pop(name, default)

    adapters = removing._requests.adapters
    adapters._by_name = RemovedOnceFound(adapters._by_name)
    with pytest.raises(UnknownAdapterError, match="named 'a'"):
        removing.unload_lora("a")
    assert engine_adapters(removing) == {"a": "folder/a", "b": "folder/b"}


def test_an_engine_that_fails_to_remove_is_logged(make_model: MakeModel, caplog: Any) -> None:
    class Failing(RemovingEngine):
        def remove_adapter(self, name: str) -> None:
            raise RuntimeError("no")

    llm = make_model(Failing(VOCAB_SIZE))
    llm.load_lora("folder/a", "a")
    llm.unload_lora("a")
    llm._scheduler.run(lambda _: None)
    assert "a call on the engine's thread failed" in caplog.text
    assert torch.equal(llm.next_token_logprobs_sync([1]), expected([1], None))


# -- prefixes -------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda llm: llm.pin_prefix([1]), AsyncLM.clear_kv_cache])
def test_an_engine_that_keeps_no_prefixes_says_so(
    loaded: Loaded, call: Callable[[AsyncLM], None]
) -> None:
    with pytest.raises(UnsupportedCapabilityError, match=r"'scripted' .* 'prefix_cache'"):
        call(loaded.llm)


class PrefixEngine(ScriptedEngine):
    capabilities = frozenset({Capability.LORA, Capability.PREFIX_CACHE})

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, max_context=4)
        self.kept: list[tuple[tuple[int, ...], str | None, str]] = []

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        self.kept.append((tuple(token_ids), adapter, threading.current_thread().name))

    def clear_prefix_cache(self) -> None:
        self.kept.clear()


def test_prefixes_reach_the_engine_on_its_thread_with_their_adapter(
    make_model: MakeModel,
) -> None:
    engine = PrefixEngine()
    llm = make_model(engine, name="prefix")
    llm.load_lora("folder", "a")
    llm.pin_prefix(torch.tensor([1, 2]))
    llm.pin_prefix([3], lora_name="a")
    llm.with_lora("a").pin_prefix([4])
    assert [prefix[:2] for prefix in engine.kept] == [((1, 2), None), ((3,), "a"), ((4,), "a")]
    assert {prefix[2] for prefix in engine.kept} == {"genlm-prefix"}
    llm.clear_kv_cache()
    assert engine.kept == []


def test_a_wrong_prefix_is_refused_as_a_wrong_request_is(make_model: MakeModel) -> None:
    engine = PrefixEngine()
    llm = make_model(engine)
    for wrong in ([], [1] * 5, [VOCAB_SIZE], [1.5]):
        with pytest.raises((ValueError, TypeError)):
            llm.pin_prefix(wrong)
    with pytest.raises(UnknownAdapterError):
        llm.pin_prefix([1], lora_name="a")
    assert engine.kept == []


def test_the_members_of_a_population_have_one_adapter(loaded: Loaded) -> None:
    contexts = [loaded.llm.context([1], lora_name="a"), loaded.llm.context([1])]
    with pytest.raises(ValueError, match=r"have one adapter; found None, a$"):
        loaded.llm.population(contexts)
