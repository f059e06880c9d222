"""Checks of contexts: handles of token sequences that programs extend."""

from __future__ import annotations

import asyncio
import contextlib

from genlm import Capability, Context, OutputCache, QueryResetError
from genlm.testing.check import engine_check
from genlm.testing.engine_fixture import EngineFixture


@engine_check()
def contexts_may_be_dropped(fixture: EngineFixture) -> None:
    """Dropping contexts in any order and recreating them changes no row."""
    lm = fixture.load(output_cache=OutputCache(0))

    def settle() -> None:  # reference counts drop contexts; a collection takes long
        fixture.run(lm.next_token_logprobs(fixture.some_sequences(1)[0]))

    for token_ids in fixture.some_sequences(4):
        for last in list(fixture.token_ids)[:3]:
            parent = lm.context(token_ids[: fixture.max_length - 2] or token_ids)
            fixture.check_context(parent, how="requested")
            children = [parent.extend(last), parent.extend(token_ids[0])]
            for child in children:
                fixture.check_context(child, how="requested")
            del parent, child
            settle()
            for child in children:
                fixture.check_context(child, how="parents before children")
                if len(child) < fixture.max_length:
                    fixture.check_context(child.extend(last), how="parents before children")
            last_ids = children[0].token_ids
            del children, child
            settle()
            fixture.check_context(lm.context(last_ids), how="recreated")
            parent = lm.context(last_ids[:-1])
            fixture.check_context(parent, how="recreated")
            child = parent.extend(last)
            fixture.check_context(child, how="recreated")
            del child
            settle()
            fixture.check_context(parent.extend(last), how="children before parents")


@engine_check()
def contexts_outlast_what_ends_requests(fixture: EngineFixture) -> None:
    """Contexts return the same rows after cancellation, reset and cleared caches."""
    lm, probe = fixture.load_probed(output_cache=OutputCache(0))

    async def interrupt(contexts: list[Context], how: str) -> None:
        requests = [context.next_token_logprobs() for context in contexts]
        async with probe.held(*requests) as tasks:
            if how == "reset":
                lm.cancel_all()
            else:
                for task in tasks:
                    task.cancel()
            await asyncio.sleep(0)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, QueryResetError):
                await task

    for token_ids in fixture.some_sequences(3):
        context = lm.context(token_ids[: fixture.max_length - 2])
        for how in ("cancelled", "reset"):
            fixture.check_context(context)
            first, second = (context.extend(i) for i in list(fixture.token_ids)[:2])
            fixture.run(interrupt([first, second], how))
            for later in (second, context, first, second.extend(token_ids[0])):
                fixture.check_context(later, after=how)
        lm.clear_output_cache()
        if Capability.PREFIX_CACHE in lm.capabilities:
            fixture.call(lm.clear_kv_cache)
        for later in (first.extend(token_ids[0]), second, context):
            fixture.check_context(later, after="cleared")
