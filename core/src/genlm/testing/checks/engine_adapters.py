"""Checks of LoRA adapters: whose row it is, and that it is never another adapter's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from genlm import AdapterError, AsyncLM, Capability, UnknownAdapterError, UnsupportedCapability
from genlm.testing.background import on_thread
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import expect
from genlm.testing.rows import row_error
from genlm.testing.sequences import TokenTuple

Asked = tuple[TokenTuple, str | None]


@engine_check(
    needs=Capability.LORA, cases=("lora_name", "with_lora", "set_lora", "differs from the base")
)
def adapters_answer_as_themselves(trial: EngineTrial) -> None:
    """A request for an adapter gets that adapter's row, however the adapter is named."""
    names = trial.adapter_names()
    lm = trial.load(adapters=True)

    def law(token_ids: TokenTuple, name: str) -> None:
        lm.clear_cache()
        lm.set_lora(name)
        by_state = trial.run(lm.next_token_logprobs_uncached(token_ids))
        lm.clear_lora()
        rows = {
            "lora_name": trial.run(lm.next_token_logprobs(token_ids, lora_name=name)),
            "with_lora": trial.run(lm.with_lora(name).next_token_logprobs_uncached(token_ids)),
            "set_lora": by_state,
            "sync": lm.next_token_logprobs_sync(token_ids, lora_name=name),
            "batch": trial.run(lm.batch_next_token_logprobs([token_ids], lora_name=name))[0],
        }
        for how, row in rows.items():
            trial.check_row(row, token_ids, name, how=how)
            trial.saw(how)
        base, adapted = trial.expected(token_ids), trial.expected(token_ids, name)
        trial.saw("differs from the base", row_error(adapted, base) > 0.01)
        trial.check_row(trial.run(lm.next_token_logprobs(token_ids)), token_ids, after=name)

    trial.for_all(law, token_ids=trial.sequences(), name=st.sampled_from(names))


@engine_check(needs=Capability.LORA, cases=("several adapters in one step",))
def adapters_mix_in_a_batch(trial: EngineTrial) -> None:
    """Concurrent requests for the base model and for several adapters get each its own row."""
    names = [None, *trial.adapter_names()]
    probed, probe = trial.load_probed(adapters=True)

    def law(batch: list[Asked], same: TokenTuple) -> None:
        probed.clear_cache()
        asked = [*batch, *((same, name) for name in names)]
        before = len(probe.in_step)
        rows = trial.run(_gathered(probed, asked))
        for position, (row, (token_ids, name)) in enumerate(zip(rows, asked, strict=True)):
            trial.check_row(row, token_ids, name, position=position, asked=asked)
        trial.saw("several adapters in one step", probe.in_step[before] == len(set(asked)))

    pairs = st.tuples(trial.sequences(), st.sampled_from(names))
    trial.for_all(law, batch=st.lists(pairs, max_size=5), same=trial.sequences())


async def _gathered(lm: AsyncLM, asked: Sequence[Asked]) -> list[torch.Tensor]:
    rows = (lm.next_token_logprobs(ids, lora_name=name) for ids, name in _named(lm, asked))
    return list(await asyncio.gather(*rows))


def _named(lm: AsyncLM, asked: Sequence[Asked]) -> Sequence[Asked]:
    # `lora_name=None` means "the one set"; none is set here, so it is the base model.
    lm.clear_lora()
    return asked


@engine_check(
    needs=Capability.LORA, cases=("cached under another adapter", "extended after a switch")
)
def switching_adapters_serves_no_stale_row(trial: EngineTrial) -> None:
    """After a switch of adapters the next row is the new adapter's, cached or not."""
    lm = trial.load(adapters=True)
    names = [None, *trial.adapter_names()]

    def law(token_ids: TokenTuple, order: list[str | None]) -> None:
        lm.clear_cache()
        for length in (max(1, len(token_ids) - 1), len(token_ids)):
            for name in order:
                _set(lm, name)
                prefix = token_ids[:length]
                row = trial.run(lm.next_token_logprobs(prefix))
                trial.check_row(row, prefix, name, order=order)
        _set(lm, None)
        trial.saw("cached under another adapter", len(set(order)) > 1)
        trial.saw("extended after a switch", len(set(order)) > 1 and len(token_ids) > 1)

    orders = st.lists(st.sampled_from(names), min_size=2, max_size=6)
    trial.for_all(law, token_ids=trial.sequences(), order=orders)


def _set(lm: AsyncLM, name: str | None) -> None:
    if name is None:
        lm.clear_lora()
    else:
        lm.set_lora(name)


@engine_check(needs=Capability.LORA, cases=("unknown", "not loadable", "loaded again"))
def wrong_adapters_are_refused(trial: EngineTrial) -> None:
    """An adapter that is unknown or cannot be loaded is an error, and nothing changes."""
    first, second = trial.adapter_names()[:2]
    lm = trial.load(adapters=True)
    token_ids = trial.some_sequences(1)[0]
    for name, call in _calls(lm, token_ids, "no such adapter").items():
        trial.expect_error(UnknownAdapterError, call, call=name)
        trial.saw("unknown")
    paths = trial.target.adapters
    for name, path in (("absent", paths[first] + "-absent"), (first, paths[second])):
        load = functools.partial(lm.add_new_lora, path, name)
        trial.expect_error(AdapterError, load, name=name, path=path)
        trial.saw("not loadable")
    trial.call(functools.partial(lm.add_new_lora, paths[first], first))
    trial.saw("loaded again")
    for adapter in (None, first, second):
        row = trial.run(lm.next_token_logprobs(token_ids, lora_name=adapter))
        trial.check_row(row, token_ids, adapter, after="wrong adapters")


@engine_check(needs=Capability.LORA, cases=("loaded while a request waited", "loaded later"))
def loading_an_adapter_disturbs_nobody(trial: EngineTrial) -> None:
    """Loading an adapter changes neither the base model's rows nor another adapter's."""
    names = trial.adapter_names()[:2]
    lm, probe = trial.load_probed()
    first, second = trial.some_sequences(2)
    trial.check_row(trial.run(lm.next_token_logprobs(first)), first)

    async def ask_while_loading() -> torch.Tensor:
        probe.hold()
        row = asyncio.ensure_future(lm.next_token_logprobs(second))
        await on_thread(probe.wait_until_entered, len(probe.in_step) + 1)
        loaded = on_thread(lm.add_new_lora, trial.target.adapters[names[0]], names[0])
        await asyncio.sleep(0)
        probe.release()
        await loaded
        return await row

    trial.check_row(trial.run(ask_while_loading()), second, while_loading=names[0])
    trial.saw("loaded while a request waited")
    load = functools.partial(lm.add_new_lora, trial.target.adapters[names[1]], names[1])
    trial.call(load)
    for name in (None, *names):
        for ask in (lm.next_token_logprobs, lm.next_token_logprobs_uncached):
            row = trial.run(ask(first, lora_name=name))
            trial.check_row(row, first, name, after="both adapters were loaded")
    trial.saw("loaded later")


@engine_check(needs=Capability.LORA, cases=("removed or refused",))
def removed_adapters_are_gone(trial: EngineTrial) -> None:
    """After `remove_lora` only requests under way get the adapter; its name can be reused."""
    paths = [trial.target.adapters[name] for name in trial.adapter_names()[:2]]
    first, second = trial.adapter_names()[:2]
    lm, probe = trial.load_probed()
    before, waiting = trial.some_sequences(2)
    lm.add_new_lora(paths[0], first)
    row = trial.run(lm.next_token_logprobs(before, lora_name=first))
    trial.check_row(row, before, first)

    if not hasattr(probe.engine, "remove_adapter"):
        remove = functools.partial(lm.remove_lora, first)
        trial.expect_error(UnsupportedCapability, remove, call="remove_lora")
        trial.saw("removed or refused")
        return

    async def remove_while_a_request_waits() -> torch.Tensor:
        probe.hold()
        base = asyncio.ensure_future(lm.next_token_logprobs(waiting))
        await on_thread(probe.wait_until_entered, len(probe.in_step) + 1)
        row = asyncio.ensure_future(lm.next_token_logprobs(waiting, lora_name=first))
        await asyncio.sleep(0)
        try:
            lm.remove_lora(first)
        finally:
            probe.release()
        await base
        return await row

    trial.check_row(trial.run(remove_while_a_request_waits()), waiting, first)
    ask = functools.partial(lm.next_token_logprobs, before, lora_name=first)
    trial.expect_error(UnknownAdapterError, ask, call="next_token_logprobs")
    lm.add_new_lora(paths[1], first)
    for token_ids in (before, waiting):
        for adapter, name in ((second, first), (None, None)):
            row = trial.run(lm.next_token_logprobs(token_ids, lora_name=name))
            trial.check_row(row, token_ids, adapter, after="the name was given again")
    trial.saw("removed or refused")


@engine_check(unless=Capability.LORA, cases=("refused",))
def undeclared_adapters_are_refused(trial: EngineTrial) -> None:
    """Without `lora` declared, every call that names an adapter is refused as unsupported."""
    lm = trial.lm
    token_ids = trial.some_sequences(1)[0]
    calls = _calls(lm, token_ids, "any") | {
        "add_new_lora": lambda: lm.add_new_lora("folder", "any")
    }
    for name, call in calls.items():
        trial.expect_error(UnsupportedCapability, call, call=name)
        trial.saw("refused")
    row = trial.run(lm.next_token_logprobs(token_ids))
    expect(row is not None, "a row without adapters", row)
    trial.check_row(row, token_ids, after="refusals")


def _calls(lm: AsyncLM, token_ids: TokenTuple, name: str) -> dict[str, Callable[[], Any]]:
    return {
        "next_token_logprobs": lambda: lm.next_token_logprobs(token_ids, lora_name=name),
        "batch": lambda: lm.batch_next_token_logprobs([token_ids], lora_name=name),
        "sync": lambda: lm.next_token_logprobs_sync(token_ids, lora_name=name),
        "sample": lambda: lm.sample(token_ids, 1, lora_name=name),
        "with_lora": lambda: lm.with_lora(name),
        "set_lora": lambda: lm.set_lora(name),
    }
