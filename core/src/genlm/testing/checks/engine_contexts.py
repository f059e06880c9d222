"""Checks of contexts: handles of token sequences that programs extend."""

from __future__ import annotations

import asyncio
import contextlib
import functools

from hypothesis import strategies as st

from genlm import (
    Capability,
    Context,
    EngineClosedError,
    OutputCache,
    QueryResetError,
    UnknownAdapterError,
)
from genlm.testing.check import engine_check, expect
from genlm.testing.engine_fixture import EngineFixture, gathered
from genlm.testing.strategies import TokenTuple

POPULATION = 4
STEPS = 6


@engine_check(cases=("one token at a time", "several at once", "joined", "from the cache"))
def contexts_equal_lists(fixture: EngineFixture) -> None:
    """A context is the same request as the list of its ids, however the context was made."""
    lm, probe = fixture.load_probed()

    def holds(token_ids: TokenTuple, other: TokenTuple) -> None:
        one_by_one = lm.context(token_ids[:1])
        for token_id in token_ids[1:]:
            one_by_one = one_by_one.extend(token_id)
        fixture.saw("one token at a time", len(token_ids) > 1)
        at_once = lm.context(token_ids[:1]).extend(token_ids[1:])
        fixture.saw("several at once", len(token_ids) > 2)
        whole = lm.context(list(token_ids))
        for context in (one_by_one, at_once, whole):
            expect(
                context == whole and hash(context) == hash(whole),
                "contexts of equal ids to be equal",
                f"{context!r} and {whole!r}",
            )
            expect(
                context.token_ids == token_ids and len(context) == len(token_ids),
                f"the ids {token_ids}",
                context.token_ids,
            )
        expect(
            (lm.context(other) == whole) == (other == token_ids),
            "contexts of other ids to be different",
            f"{lm.context(other)!r} == {whole!r}",
        )
        lm.clear_output_cache()
        before = len(probe.submitted)
        asked = [one_by_one, token_ids, at_once]
        rows = fixture.run(gathered(lm.next_token_logprobs, asked))
        fixture.check_rows(rows, [token_ids] * 3, asked="as contexts and as a list")
        expect(
            len(probe.submitted) == before + 1,
            "one evaluation for a context and the list of its ids",
            len(probe.submitted) - before,
        )
        fixture.saw("joined")
        for again in (whole, token_ids):
            fixture.check_row(fixture.run(lm.next_token_logprobs(again)), token_ids)
        fixture.check_row(whole.next_token_logprobs_sync(), token_ids, how="sync")
        expect(
            len(probe.submitted) == before + 1,
            "a cached row for a context and the list of its ids",
            f"{len(probe.submitted) - before} evaluations",
        )
        fixture.saw("from the cache")

    fixture.for_all(holds, token_ids=fixture.sequences(), other=fixture.sequences())


@engine_check(cases=("siblings", "a parent after its children", "held back", "several tokens"))
def extended_contexts_have_their_own_rows(fixture: EngineFixture) -> None:
    """Contexts that grow, fork and wait get their uncached rows, in any order."""
    lm = fixture.load(output_cache=OutputCache(0))
    ids = list(fixture.token_ids)

    def ask(context: Context) -> None:
        row = fixture.run(context.next_token_logprobs())
        fixture.check_row(row, context.token_ids, asked="alone")

    for prompt in fixture.some_sequences(4):  # random programs may fork rarely
        parent = lm.context(prompt[: max(1, fixture.max_length - 3)])
        ask(parent)
        children = [parent.extend(token_id) for token_id in ids[:2]]
        grandchildren = [child.extend(prompt[0]) for child in children]
        last = [each.extend(prompt[0]) for each in grandchildren]
        for each in (*children, *grandchildren, *last, parent):
            if len(each) <= fixture.max_length:
                ask(each)

    def holds(prompt: TokenTuple, program: list[tuple[int, int, bool]]) -> None:
        population = [lm.context(prompt)] * POPULATION
        for step in range(0, len(program), POPULATION):
            moves = program[step : step + POPULATION]
            extended = {}
            for slot, (parent, token, waits) in enumerate(moves):
                fixture.saw("held back", waits)
                if waits or len(population[parent]) >= fixture.max_length:
                    continue
                added = [ids[token % len(ids)]] * (1 + token % 3 // 2)
                room = fixture.max_length - len(population[parent])
                extended[slot] = population[parent].extend(added[:room])
                fixture.saw("several tokens", min(len(added), room) > 1)
            parents = [parent for parent, _, _ in moves]
            fixture.saw("siblings", len(set(parents)) < len(parents))
            asked = list(extended.values())
            rows = fixture.run(lm.batch_next_token_logprobs(asked))
            fixture.check_rows(rows, [each.token_ids for each in asked], program=program)
            again = population[moves[0][0]]
            row = fixture.run(again.next_token_logprobs())
            fixture.check_row(row, again.token_ids, program=program)
            fixture.saw("a parent after its children", bool(asked))
            population = [extended.get(i, each) for i, each in enumerate(population)]

    move = st.tuples(st.integers(0, POPULATION - 1), st.integers(0, 10**6), st.booleans())
    fixture.for_all(
        holds,
        examples=max(3, fixture.profile.examples // 2),
        prompt=fixture.sequences(shorter_by=min(STEPS, fixture.max_length - 1)),
        program=st.lists(move, min_size=POPULATION, max_size=POPULATION * STEPS),
    )


@engine_check(cases=("parents before children", "children before parents", "made again"))
def contexts_may_be_dropped(fixture: EngineFixture) -> None:
    """Contexts are dropped in any order, and made again, without a change of any row."""
    lm = fixture.load(output_cache=OutputCache(0))

    def ask(context: Context, how: str) -> None:
        row = fixture.run(context.next_token_logprobs())
        fixture.check_row(row, context.token_ids, how=how)
        fixture.saw(how)

    def settle() -> None:  # reference counts drop contexts; a collection takes long
        fixture.run(lm.next_token_logprobs(fixture.some_sequences(1)[0]))

    for token_ids in fixture.some_sequences(4):
        for last in list(fixture.token_ids)[:3]:
            parent = lm.context(token_ids[: fixture.max_length - 2] or token_ids)
            ask(parent, "asked")
            children = [parent.extend(last), parent.extend(token_ids[0])]
            for child in children:
                ask(child, "asked")
            del parent, child
            settle()
            for child in children:
                ask(child, "parents before children")
                if len(child) < fixture.max_length:
                    ask(child.extend(last), "parents before children")
            made_again = children[0].token_ids
            del children, child
            settle()
            ask(lm.context(made_again), "made again")
            parent = lm.context(made_again[:-1])
            ask(parent, "made again")
            child = parent.extend(last)
            ask(child, "made again")
            del child
            settle()
            ask(parent.extend(last), "children before parents")


@engine_check(cases=("cancelled", "reset", "cleared", "closed"))
def contexts_outlast_what_ends_requests(fixture: EngineFixture) -> None:
    """Contexts have their rows after cancellation, reset and cleared caches, until `close`."""
    lm, probe = fixture.load_probed(output_cache=OutputCache(0))

    async def interrupted(contexts: list[Context], how: str) -> None:
        tasks = await probe.start_held(*(each.next_token_logprobs() for each in contexts))
        try:
            if how == "reset":
                lm.cancel_all()
            else:
                for task in tasks:
                    task.cancel()
            await asyncio.sleep(0)
        finally:
            probe.release()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, QueryResetError):
                await task

    for token_ids in fixture.some_sequences(3):
        context = lm.context(token_ids[: fixture.max_length - 2])
        for how in ("cancelled", "reset"):
            fixture.check_row(fixture.run(context.next_token_logprobs()), context.token_ids)
            first, second = (context.extend(i) for i in list(fixture.token_ids)[:2])
            fixture.run(interrupted([first, second], how))
            fixture.saw(how)
            for each in (second, context, first, second.extend(token_ids[0])):
                row = fixture.run(each.next_token_logprobs())
                fixture.check_row(row, each.token_ids, after=how)
        lm.clear_output_cache()
        if Capability.PREFIX_CACHE in lm.capabilities:
            fixture.call(lm.clear_kv_cache)
        fixture.saw("cleared")
        for each in (first.extend(token_ids[0]), second, context):
            row = fixture.run(each.next_token_logprobs())
            fixture.check_row(row, each.token_ids, after="cleared")
    fixture.call(lm.close)
    fixture.saw("closed")
    fixture.expect_error(EngineClosedError, context.next_token_logprobs_sync)
    fixture.expect_error(EngineClosedError, context.next_token_logprobs)
    expect(len(context.extend(token_ids[0])) == len(context) + 1, "contexts to outlast", "")


@engine_check(cases=("extended by several threads",))
def contexts_are_shared_by_threads(fixture: EngineFixture) -> None:
    """Threads that extend and ask the same contexts get the right rows."""
    lm = fixture.load(output_cache=OutputCache(0))
    ids = list(fixture.token_ids)
    roots = [lm.context(each[: fixture.max_length - 3]) for each in fixture.some_sequences(2)]

    def extend(first: int) -> None:
        for round_ in range(STEPS):
            root = roots[round_ % len(roots)]
            context = root
            for position in range(min(3, fixture.max_length - len(root))):
                token_id = ids[(first + round_ * (position + 1)) % len(ids)]
                context = context.extend(token_id)
                row = context.next_token_logprobs_sync()
                expect(
                    context.token_ids[-1] == token_id
                    and len(context) == len(root) + position + 1,
                    f"a context that ends in {token_id}",
                    repr(context),
                )
                fixture.check_row(row, context.token_ids, thread=first)

    fixture.call_together([functools.partial(extend, first) for first in range(3)])
    fixture.saw("extended by several threads")


@engine_check(cases=("another model", "another adapter"))
def contexts_belong_to_one_model(fixture: EngineFixture) -> None:
    """A context of another model, or with another adapter's name, is refused."""
    other = fixture.load()
    (token_ids, *_) = fixture.some_sequences(1)
    context = other.context(token_ids)
    for call in (fixture.lm.next_token_logprobs, fixture.lm.next_token_logprobs_sync):
        fixture.expect_error(ValueError, functools.partial(call, context), model="another")
        fixture.saw("another model")
    own = fixture.lm.context(token_ids)
    expect(own != context, "contexts of two models to be different", repr(own))
    fixture.expect_error(
        ValueError,
        functools.partial(fixture.lm.next_token_logprobs, own, lora_name="no such adapter"),
    )
    fixture.saw("another adapter")


@engine_check(needs=Capability.LORA, cases=("switched", "default", "removed or refused"))
def contexts_keep_their_adapter(fixture: EngineFixture) -> None:
    """Contexts of equal ids and different adapters are different, and keep their adapter."""
    first, second = fixture.adapter_names()[:2]
    names = [None, first, second]
    lm = fixture.load(adapters=True, output_cache=OutputCache(0))
    for token_ids in fixture.some_sequences(2):
        short = token_ids[: fixture.max_length - 2]
        contexts = {name: lm.with_lora(name).context(short) for name in names}
        expect(len(set(contexts.values())) == 3, "three different contexts", contexts)
        for _ in range(2):
            for name, context in contexts.items():
                row = fixture.run(lm.next_token_logprobs(context))
                fixture.check_row(row, context.token_ids, name)
                fixture.saw("switched")
            contexts = {name: each.extend(short[0]) for name, each in contexts.items()}
        default = lm.with_lora(first).context(short)
        fixture.check_row(fixture.run(default.next_token_logprobs()), short, first)
        fixture.saw("default", default.lora_name == first)
    if hasattr(lm.engine, "remove_adapter"):
        lm.unload_lora(second)
        fixture.expect_error(UnknownAdapterError, contexts[second].next_token_logprobs)
    fixture.saw("removed or refused")
