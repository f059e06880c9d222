"""Check of new weights: rows are those of the current weights."""

from __future__ import annotations

import asyncio
import copy

import torch

from genlm import AsyncLM, Capability
from genlm.testing.check import Skipped, engine_check
from genlm.testing.comparison import largest_difference
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.expected_members import ExpectedMembers
from genlm.testing.probes import EngineProbe
from genlm.testing.target import TokenTuple


@engine_check(needs=Capability.WEIGHTS)
def new_weights_are_used(fixture: EngineFixture) -> None:
    """After `update_weights`, rows are those of the new weights, with and without adapters."""
    if len(fixture.target.weights) < 2:
        raise Skipped("the target provides fewer than two sets of weights")
    lm, probe = fixture.load_probed(adapters=True)
    sequences = fixture.some_sequences(3)
    count, last = fixture.members, fixture.token_ids[0]
    copies = (sequences * count)[:count]
    members = ExpectedMembers.unfinished(lm.population(copies), copies)
    adapters = [None, *list(fixture.adapters)[:1]]
    contexts = [lm.context(sequences[0], lora_name=adapter) for adapter in adapters]

    def check(weights: int) -> torch.Tensor:
        fixture.use_weights(weights)
        for context, adapter in zip(contexts, adapters, strict=True):
            # The engine may have the state that the earlier weights computed of the context.
            fixture.check_context(context.extend(last), adapter, weights=weights)
            fixture.check_context(context, adapter, weights=weights)
        for adapter in (*adapters, None):
            for token_ids in sequences:
                for use_cache in (True, False):
                    fixture.check_request(
                        lm, token_ids, adapter, use_cache=use_cache, weights=weights
                    )
        fixture.check_members(members, weights=weights)
        fixture.check_members(members.extended([last] * count), weights=weights)
        if Capability.PREFIX_CACHE in lm.capabilities:
            fixture.call(lm.pin_prefix, sequences[2])
        return fixture.expected(sequences[0])

    first = check(0)
    try:
        row = fixture.run(_update_while_a_request_waits(fixture, lm, probe, sequences[1]))
        fixture.check_row(row, sequences[1], sent="before the update")
        second = check(1)
    finally:  # other checks may use the same engine
        fixture.run(lm.aupdate_weights(fixture.target.weights[0][0]()))
        fixture.run(lm.aupdate_weights())  # drops all state
    fixture.saw("weights with other rows", largest_difference(first, second) > 0.01)
    check(0)


async def _update_while_a_request_waits(
    fixture: EngineFixture, lm: AsyncLM, probe: EngineProbe, token_ids: TokenTuple
) -> torch.Tensor:
    async with probe.held(lm.next_token_logprobs(token_ids, use_cache=False)) as (row,):
        weights = copy.deepcopy(dict(fixture.target.weights[1][0]()))
        updating = asyncio.ensure_future(lm.aupdate_weights(weights))
        await asyncio.sleep(0)
    await updating
    for tensor in weights.values():  # the engine has copies
        tensor[...] = 0
    result: torch.Tensor = await row
    return result
