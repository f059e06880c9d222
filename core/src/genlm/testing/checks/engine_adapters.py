"""Checks of LoRA adapters: every row is that of the requested adapter."""

from __future__ import annotations

import asyncio

import torch
from hypothesis import strategies as st

from genlm import (
    AdapterError,
    Capability,
    UnknownAdapterError,
    UnsupportedCapabilityError,
)
from genlm.testing.check import engine_check
from genlm.testing.comparison import largest_difference
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.fixture import on_thread
from genlm.testing.target import TokenTuple

AdapterRequest = tuple[TokenTuple, str | None]


@engine_check(needs=Capability.LORA)
def adapters_answer_as_themselves(fixture: EngineFixture) -> None:
    """A request or context returns the row of its adapter, however the adapter is selected."""
    names = fixture.adapter_names()
    lm = fixture.load(adapters=True)

    def holds(token_ids: TokenTuple, name: str) -> None:
        lm.clear_output_cache()
        for adapter in (None, name, None):
            context = lm.with_lora(adapter).context(token_ids[:-1] or token_ids)
            fixture.check_context(context, adapter)
            fixture.check_context(context.extend(token_ids[len(context) :]), adapter)
        fixture.check_request(lm, token_ids, name, use_cache=False, how="uncached")
        row = lm.next_token_logprobs_sync(token_ids, lora_name=name)
        fixture.check_row(row, token_ids, name, how="sync")
        batch = fixture.run(lm.batch_next_token_logprobs([token_ids], lora_name=name))
        fixture.check_rows(batch, [token_ids], name, how="batch")
        base, adapted = fixture.expected(token_ids), fixture.expected(token_ids, name)
        fixture.saw("differs from the base", largest_difference(adapted, base) > 0.01)
        fixture.check_request(lm, token_ids, after=name)

    fixture.for_all(holds, token_ids=fixture.sequences(), name=st.sampled_from(names))


@engine_check(needs=Capability.LORA)
def adapters_mix_in_a_batch(fixture: EngineFixture) -> None:
    """Concurrent requests for the base model and several adapters return the right rows."""
    names = [None, *fixture.adapter_names()]
    lm, probe = fixture.load_probed(adapters=True)

    def holds(batch: list[AdapterRequest], same: TokenTuple) -> None:
        lm.clear_output_cache()
        requests = [*batch, *((same, name) for name in names)]
        before = len(probe.in_step)
        rows = fixture.gather(
            lm.next_token_logprobs(ids, lora_name=name) for ids, name in requests
        )
        for position, (row, (token_ids, name)) in enumerate(zip(rows, requests, strict=True)):
            fixture.check_row(row, token_ids, name, position=position, requests=requests)
        fixture.saw("several adapters in one step", probe.in_step[before] == len(set(requests)))

    pairs = st.tuples(fixture.sequences(), st.sampled_from(names))
    fixture.for_all(holds, batch=st.lists(pairs, max_size=5), same=fixture.sequences())


@engine_check(needs=Capability.LORA)
def wrong_adapters_are_refused(fixture: EngineFixture) -> None:
    """Loading an invalid adapter raises an error and changes nothing."""
    first, second = fixture.adapter_names()[:2]
    lm = fixture.load(adapters=True)
    token_ids = fixture.some_sequences(1)[0]
    paths = fixture.target.adapters
    for name, path in (("absent", paths[first] + "-absent"), (first, paths[second])):
        fixture.expect_error(AdapterError, lm.load_lora, path, name, name=name, path=path)
    fixture.call(lm.load_lora, paths[first], first)
    for adapter in (None, first, second):
        fixture.check_request(lm, token_ids, adapter, after="wrong adapters")


@engine_check(needs=Capability.LORA)
def loading_an_adapter_changes_no_row(fixture: EngineFixture) -> None:
    """Loading an adapter changes neither the base model's rows nor another adapter's."""
    names = fixture.adapter_names()[:2]
    lm, probe = fixture.load_probed()
    first, second = fixture.some_sequences(2)
    fixture.check_request(lm, first)

    async def request_while_loading() -> torch.Tensor:
        async with probe.held(lm.next_token_logprobs(second)) as (row,):
            loading = on_thread(lm.load_lora, fixture.target.adapters[names[0]], names[0])
            await asyncio.sleep(0)
        await loading
        result: torch.Tensor = await row
        return result

    fixture.check_row(fixture.run(request_while_loading()), second, while_loading=names[0])
    fixture.call(lm.load_lora, fixture.target.adapters[names[1]], names[1])
    for name in (None, *names):
        for use_cache in (True, False):
            fixture.check_request(lm, first, name, use_cache=use_cache, after="both loads")


@engine_check(needs=Capability.LORA)
def removed_adapters_are_gone(fixture: EngineFixture) -> None:
    """After `unload_lora`, only in-flight requests use the adapter; its name can be reused."""
    paths = [fixture.target.adapters[name] for name in fixture.adapter_names()[:2]]
    first, second = fixture.adapter_names()[:2]
    lm, probe = fixture.load_probed()
    before, waiting = fixture.some_sequences(2)
    lm.load_lora(paths[0], first)
    fixture.check_request(lm, before, first)

    if not hasattr(probe.engine, "remove_adapter"):
        fixture.expect_error(
            UnsupportedCapabilityError, lm.unload_lora, first, call="unload_lora"
        )
        return

    async def remove_while_a_request_waits() -> torch.Tensor:
        async with probe.held(lm.next_token_logprobs(waiting)) as (base,):
            row = asyncio.ensure_future(lm.next_token_logprobs(waiting, lora_name=first))
            await asyncio.sleep(0)
            lm.unload_lora(first)
        await base
        return await row

    fixture.check_row(fixture.run(remove_while_a_request_waits()), waiting, first)
    fixture.expect_error(
        UnknownAdapterError,
        lambda: lm.next_token_logprobs(before, lora_name=first),
        call="next_token_logprobs",
    )
    lm.load_lora(paths[1], first)
    for token_ids in (before, waiting):
        for adapter, name in ((second, first), (None, None)):
            row = fixture.run(lm.next_token_logprobs(token_ids, lora_name=name))
            fixture.check_row(row, token_ids, adapter, after="the name was reused")
    lm.unload_lora(first)  # a shared engine may have room for the target's adapters only
    lm.next_token_logprobs_sync(before, use_cache=False)  # removes it before the model closes
