"""Checks that the caches of an engine change no row."""

from __future__ import annotations

from hypothesis import strategies as st

from genlm import Capability, OutputCache
from genlm.testing.check import NotApplicable, Skipped, engine_check
from genlm.testing.checks.engine_populations import check_populations_in_turns
from genlm.testing.comparison import largest_difference
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.strategies import near_misses
from genlm.testing.target import TokenTuple

_FORKS = 6
"""Siblings from each of two sequences; each of them needs a pass of the oracle."""

_CHILDREN = 2


@engine_check()
def near_misses_are_told_apart(fixture: EngineFixture) -> None:
    """A sequence that resembles an earlier one has its own row."""

    def holds(token_ids: TokenTuple) -> None:
        fixture.lm.clear_output_cache()
        expected = fixture.expected(token_ids)
        limit = fixture.lm.max_context or fixture.target.max_length
        misses = [miss for miss in near_misses(token_ids).values() if len(miss) <= limit]
        for miss in misses:  # a wrong row can be detected only if the two rows differ
            difference = largest_difference(fixture.expected(miss), expected)
            fixture.saw(
                "a near miss with another row", difference > fixture.target.largest_error
            )
        sequences = [token_ids, *misses]
        one_by_one = [fixture.run(fixture.lm.next_token_logprobs(ids)) for ids in sequences]
        # Checked at the end, because a later row may have changed an earlier one.
        fixture.check_rows(one_by_one, sequences, how="one after another", sequences=sequences)
        fixture.lm.clear_output_cache()
        fixture.check_batch(fixture.lm, sequences, how="together", sequences=sequences)

    # Short ones first: a model with a short window gives long near misses the same row.
    for position, token_ids in enumerate(fixture.some_sequences(15)):
        holds((token_ids * 3)[: min(2 + position % 5, fixture.max_length)])
    fixture.for_all(holds, token_ids=fixture.sequences())


@engine_check()
def prefixes_equal_fresh_evaluation(fixture: EngineFixture) -> None:
    """A sequence or context that is extended, forked or shortened returns its uncached row."""
    lm = fixture.load(output_cache=OutputCache(0))

    def holds(token_ids: TokenTuple, other: TokenTuple, fork: int) -> None:
        prefixes = [token_ids[:length] for length in range(1, len(token_ids) + 1)]
        fixture.expected_rows(token_ids)
        for prefix in prefixes:
            fixture.check_request(lm, prefix, how="extended")
        fixture.saw("extended", len(prefixes) > 1)
        stem = token_ids[: fork % len(token_ids)]
        siblings = [*other[:_FORKS], *token_ids[:_FORKS]]
        forks = [(*stem, token_id) for token_id in siblings]
        fixture.check_batch(lm, forks, how="forked", grown_from=token_ids)
        fixture.saw("forked", len(stem) > 0 and len(set(forks)) > 1)
        for prefix in (stem + other)[: fixture.max_length], prefixes[len(stem)]:
            fixture.check_request(lm, prefix, how="shortened")
        parent = lm.context(prefixes[len(stem)])
        children = [parent.extend(token_id) for token_id in siblings[:_CHILDREN]]
        for context in (parent, *children, children[0].extend(siblings[0]), parent):
            if len(context) <= fixture.max_length:
                fixture.check_context(context)

    fixture.for_all(
        holds,
        token_ids=fixture.sequences(),
        other=fixture.sequences(),
        fork=st.integers(1, fixture.max_length),
    )


@engine_check()
def tight_budgets_change_nothing(fixture: EngineFixture) -> None:
    """Rows of sequences and populations do not change when caches have almost no room."""
    variants = fixture.target.tight_options
    if not variants:
        if Capability.PREFIX_CACHE in fixture.lm.capabilities:
            raise Skipped("the target names no tight_options for its prefix cache")
        raise NotApplicable("the target names no tight_options, so the engine has no caches")
    roots = fixture.some_sequences(4)
    for root in roots:
        fixture.expected_rows(root)
    for salt, options in enumerate(variants):
        lm = fixture.load(engine_options=options, output_cache=OutputCache(1))
        for length in [*range(1, fixture.max_length + 1), 1, fixture.max_length]:
            batch = [root[:length] for root in roots]
            fixture.check_batch(lm, batch, engine_options=options, batch=batch)
            # The last evaluation is still cached in part; a hit must give the right row.
            for ids in (batch[-1], batch[0]):
                fixture.check_request(
                    lm, ids, use_cache=False, engine_options=options, after=batch
                )
            context = lm.context(batch[1])  # drops the last one, whose state may be evicted
            fixture.check_context(context, engine_options=options, after=batch)
        check_populations_in_turns(fixture, lm, salt, engine_options=options)


@engine_check(needs=Capability.PREFIX_CACHE)
def kept_prefixes_change_nothing(fixture: EngineFixture) -> None:
    """Pinning a prefix with `pin_prefix`, pinning it twice and freeing it change no row."""

    def holds(prefix: TokenTuple, other: TokenTuple) -> None:
        fixture.lm.clear_output_cache()
        sequences = [
            prefix,
            (prefix + other)[: fixture.max_length],
            prefix[:1] + other[1:],
            other,
        ]
        for pinned in (prefix, prefix, (prefix + other)[: fixture.max_length]):
            fixture.call(fixture.lm.pin_prefix, pinned)
            for ids in sequences:
                fixture.check_request(fixture.lm, ids, use_cache=False, pinned=pinned)
        fixture.call(fixture.lm.clear_kv_cache)
        for ids in sequences:
            fixture.check_request(fixture.lm, ids, use_cache=False, freed=prefix)

    fixture.for_all(holds, prefix=fixture.sequences(shorter_by=1), other=fixture.sequences())
