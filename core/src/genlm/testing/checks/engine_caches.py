"""Checks that no cache, in front of the engine or inside it, changes a row."""

from __future__ import annotations

import functools

import torch

from genlm import AsyncLM, Capability, OutputCache, UnsupportedCapabilityError
from genlm.testing.check import NotApplicable, Skipped, engine_check, expect
from genlm.testing.comparison import largest_difference
from genlm.testing.engine_fixture import EngineFixture
from genlm.testing.strategies import TokenTuple, near_misses

SMALL = 3
"""Rows in a small output cache: fewer than the sequences of a check."""


@engine_check(cases=("size 0", "size 1", "small", "unbounded", "evicted", "hit"))
def output_cache_sizes(fixture: EngineFixture) -> None:
    """Rows are the same with an output cache of any size, which is never exceeded."""
    sizes = {"size 0": 0, "size 1": 1, "small": SMALL, "unbounded": 10**6}
    for case, size in sizes.items():
        lm = fixture.load(output_cache=OutputCache(size))
        fixture.saw(case)
        fixture.for_all(
            functools.partial(_cached_rows, fixture, lm, size),
            examples=max(3, fixture.profile.examples // 3),
            batch=fixture.batches(),
        )


def _cached_rows(
    fixture: EngineFixture, lm: AsyncLM, size: int, *, batch: list[TokenTuple]
) -> None:
    for asked in (batch, batch[::-1]):
        hits = lm.statistics().cache_hits
        rows = fixture.run(lm.batch_next_token_logprobs(asked))
        fixture.check_rows(rows, asked, cache_size=size, batch=asked)
        found = lm.statistics()
        expect(
            found.cache_entries <= size,
            f"at most {size} rows in an output cache of that size",
            f"{found.cache_entries}",
            batch=asked,
        )
        expect(
            size > 0 or found.cache_hits == 0,
            "no hit in an output cache of size 0",
            f"{found.cache_hits}",
        )
        fixture.saw("hit", found.cache_hits - hits)
    fixture.saw("evicted", 0 < size < len(set(batch)))


@engine_check(cases=("evicted",))
def output_cache_bytes(fixture: EngineFixture) -> None:
    """The output cache never exceeds its byte budget, and rows stay the same."""
    row_bytes = 4 * fixture.lm.vocab_size
    for budget in (row_bytes - 1, 3 * row_bytes - 1):
        lm = fixture.load(output_cache=OutputCache(100, max_bytes=budget))
        for asked in fixture.some_sequences(5) * 2:
            fixture.check_row(fixture.run(lm.next_token_logprobs(asked)), asked, budget=budget)
            used = lm.statistics().cache_bytes
            expect(
                used <= budget,
                f"at most {budget} bytes of rows and keys",
                used,
                token_ids=asked,
            )
        fixture.saw("evicted")


@engine_check(
    cases=(
        "reversed",
        "rotated",
        "0 appended",
        "0 put in front",
        "first dropped",
        "last dropped",
    )
)
def near_misses_are_told_apart(fixture: EngineFixture) -> None:
    """A sequence that resembles an earlier one gets its own row."""

    def holds(token_ids: TokenTuple) -> None:
        fixture.lm.clear_output_cache()
        own = fixture.expected(token_ids)
        misses = {
            how: miss
            for how, miss in near_misses(token_ids).items()
            if len(miss) <= (fixture.lm.max_context or fixture.target.max_length)
        }
        for how, miss in misses.items():
            fixture.saw(how)
            # A wrong row can be detected only if the two rows differ.
            differs = (
                largest_difference(fixture.expected(miss), own) > fixture.target.largest_error
            )
            fixture.saw("another row", differs)
        one_by_one = [fixture.run(fixture.lm.next_token_logprobs(token_ids))]
        one_by_one += [
            fixture.run(fixture.lm.next_token_logprobs(miss)) for miss in misses.values()
        ]
        asked = [token_ids, *misses.values()]
        fixture.check_rows(one_by_one, asked, asked="one after another", sequences=asked)
        fixture.lm.clear_output_cache()
        together = fixture.run(fixture.lm.batch_next_token_logprobs(asked))
        fixture.check_rows(together, asked, asked="together", sequences=asked)

    # Short ones first: a model with a short window gives long near misses the same row.
    for position, token_ids in enumerate(fixture.some_sequences(15)):
        holds((token_ids * 3)[: min(2 + position % 5, fixture.max_length)])
    fixture.for_all(holds, token_ids=fixture.sequences())
    # Not for every kind: rows of a bigram model depend on the last token only.
    expect(
        fixture.cases["another row"] > 0,
        "near misses that have another row than the sequence, by the oracle",
        "none; certify a model whose rows depend on its tokens",
    )


@engine_check(cases=("extended", "forked", "back to an earlier prefix"))
def prefixes_equal_fresh_evaluation(fixture: EngineFixture) -> None:
    """A sequence grown token by token, forked or shortened gets its uncached row."""

    def holds(token_ids: TokenTuple, other: TokenTuple, fork: int) -> None:
        fixture.lm.clear_output_cache()
        grown = [token_ids[:length] for length in range(1, len(token_ids) + 1)]
        for prefix in grown:
            _check_alone(fixture, prefix, "extended")
        kept = token_ids[: fork % len(token_ids)]
        forks = [(*kept, token_id) for token_id in (*other, *token_ids)][: fixture.max_length]
        rows = fixture.run(fixture.lm.batch_next_token_logprobs(forks))
        fixture.check_rows(rows, forks, how="forked", grown_from=token_ids)
        fixture.saw("forked", len(kept) > 0 and len(set(forks)) > 1)
        for prefix in (kept + other)[: fixture.max_length], grown[len(kept)]:
            _check_alone(fixture, prefix, "back to an earlier prefix")

    fixture.for_all(
        holds,
        token_ids=fixture.sequences(),
        other=fixture.sequences(),
        fork=fixture.lengths(),
    )


def _check_alone(fixture: EngineFixture, token_ids: TokenTuple, how: str) -> None:
    row = fixture.run(fixture.lm.next_token_logprobs(token_ids, use_cache=False))
    fixture.check_row(row, token_ids, how=how)
    fixture.saw(how, len(token_ids) > 1)


@engine_check(cases=("more prefixes than fit",))
def tight_budgets_change_nothing(fixture: EngineFixture) -> None:
    """Rows are the same when the engine's own caches have almost no room."""
    variants = fixture.target.tight_variants
    if not variants:
        if Capability.PREFIX_CACHE in fixture.lm.capabilities:
            raise Skipped("the target names no tight_options for its prefix cache")
        raise NotApplicable("the target names no tight_options, so the engine has no caches")
    roots = fixture.some_sequences(4)
    for options in variants:
        lm = fixture.load(engine_options=options, output_cache=OutputCache(1))
        for length in [*range(1, fixture.max_length + 1), 1, fixture.max_length]:
            asked = [root[:length] for root in roots]
            rows: torch.Tensor = fixture.run(lm.batch_next_token_logprobs(asked))
            fixture.check_rows(rows, asked, engine_options=options, batch=asked)
            # The last evaluation is still cached in part; a hit must give the right row.
            for token_ids in (asked[-1], asked[0]):
                row = fixture.run(lm.next_token_logprobs(token_ids, use_cache=False))
                fixture.check_row(row, token_ids, engine_options=options, after=asked)
        fixture.saw("more prefixes than fit")


@engine_check(needs=Capability.PREFIX_CACHE, cases=("asked below a kept prefix", "cleared"))
def kept_prefixes_change_nothing(fixture: EngineFixture) -> None:
    """Keeping a prefix with `pin_prefix`, keeping it twice and freeing it change no row."""

    def holds(prefix: TokenTuple, other: TokenTuple) -> None:
        fixture.lm.clear_output_cache()
        asked = [prefix, (prefix + other)[: fixture.max_length], prefix[:1] + other[1:], other]
        for kept in (prefix, prefix, (prefix + other)[: fixture.max_length]):
            fixture.call(functools.partial(fixture.lm.pin_prefix, kept))
            for token_ids in asked:
                row = fixture.run(fixture.lm.next_token_logprobs(token_ids, use_cache=False))
                fixture.check_row(row, token_ids, kept=kept)
        fixture.saw("asked below a kept prefix")
        fixture.call(fixture.lm.clear_kv_cache)
        for token_ids in asked:
            row = fixture.run(fixture.lm.next_token_logprobs(token_ids, use_cache=False))
            fixture.check_row(row, token_ids, freed=prefix)
        fixture.saw("cleared")

    fixture.for_all(holds, prefix=fixture.sequences(shorter_by=1), other=fixture.sequences())


@engine_check(unless=Capability.PREFIX_CACHE, cases=("refused",))
def undeclared_prefix_cache_is_refused(fixture: EngineFixture) -> None:
    """Without `prefix_cache` declared, `pin_prefix` and `clear_kv_cache` are refused."""
    calls = {
        "pin_prefix": lambda: fixture.lm.pin_prefix(fixture.some_sequences(1)[0]),
        "clear_kv_cache": fixture.lm.clear_kv_cache,
    }
    for name, call in calls.items():
        fixture.expect_error(UnsupportedCapabilityError, call, call=name)
        fixture.saw("refused")
