"""Checks that no cache, in front of the engine or inside it, ever changes an answer."""

from __future__ import annotations

import functools

import torch

from genlm import AsyncLM, Capability, OutputCache, UnsupportedCapability
from genlm.testing.check import engine_check
from genlm.testing.engine_trial import EngineTrial
from genlm.testing.failure import NotApplicable, Skipped, expect
from genlm.testing.rows import row_error
from genlm.testing.sequences import TokenTuple, near_misses

SMALL = 3
"""Rows in a small output cache: fewer than the sequences that go through it."""


@engine_check(cases=("answered from the cache", "asked again uncached"))
def warm_equals_cold(trial: EngineTrial) -> None:
    """A repeated request gets the row of the first time, from the cache or without it."""

    def law(token_ids: TokenTuple) -> None:
        trial.lm.clear_cache()
        before = trial.lm.statistics().cache_hits
        for time in ("first", "second", "third"):
            row = trial.run(trial.lm.next_token_logprobs(token_ids))
            trial.check_row(row, token_ids, time=time)
        trial.saw("answered from the cache", trial.lm.statistics().cache_hits - before)
        row = trial.run(trial.lm.next_token_logprobs_uncached(token_ids))
        trial.check_row(row, token_ids, time="uncached")
        trial.saw("asked again uncached")

    trial.for_all(law, token_ids=trial.sequences())


@engine_check(cases=("size 0", "size 1", "small", "unbounded", "evicted", "hit"))
def output_cache_sizes(trial: EngineTrial) -> None:
    """Answers are the same with an output cache of any size, which it never exceeds."""
    sizes = {"size 0": 0, "size 1": 1, "small": SMALL, "unbounded": 10**6}
    for case, size in sizes.items():
        lm = trial.load(output_cache=OutputCache(size))
        trial.saw(case)
        trial.for_all(
            functools.partial(_cached_rows, trial, lm, size),
            examples=max(3, trial.profile.examples // 3),
            batch=trial.batches(),
        )


def _cached_rows(
    trial: EngineTrial, lm: AsyncLM, size: int, *, batch: list[TokenTuple]
) -> None:
    for asked in (batch, batch[::-1]):
        hits = lm.statistics().cache_hits
        rows = trial.run(lm.batch_next_token_logprobs(asked))
        trial.check_rows(rows, asked, cache_size=size, batch=asked)
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
        trial.saw("hit", found.cache_hits - hits)
    trial.saw("evicted", 0 < size < len(set(batch)))


@engine_check(cases=("evicted",))
def output_cache_bytes(trial: EngineTrial) -> None:
    """The output cache never exceeds a byte budget, however tiny, and answers stay the same."""
    row_bytes = 4 * trial.lm.vocab_size
    for budget in (row_bytes - 1, 3 * row_bytes - 1):
        lm = trial.load(output_cache=OutputCache(100, max_bytes=budget))
        for asked in trial.some_sequences(5) * 2:
            trial.check_row(trial.run(lm.next_token_logprobs(asked)), asked, budget=budget)
            used = lm.statistics().cache_bytes
            expect(
                used <= budget,
                f"at most {budget} bytes of rows and keys",
                used,
                token_ids=asked,
            )
        trial.saw("evicted")


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
def near_misses_are_told_apart(trial: EngineTrial) -> None:
    """A sequence that resembles one asked before gets its own row."""

    def law(token_ids: TokenTuple) -> None:
        trial.lm.clear_cache()
        own = trial.expected(token_ids)
        misses = {
            how: miss
            for how, miss in near_misses(token_ids).items()
            if len(miss) <= (trial.lm.max_context or trial.target.max_length)
        }
        for how, miss in misses.items():
            trial.saw(how)
            # Only then could it be seen to get the wrong one.
            differs = row_error(trial.expected(miss), own) > trial.target.largest_error
            trial.saw("another row", differs)
        one_by_one = [trial.run(trial.lm.next_token_logprobs(token_ids))]
        one_by_one += [
            trial.run(trial.lm.next_token_logprobs(miss)) for miss in misses.values()
        ]
        asked = [token_ids, *misses.values()]
        trial.check_rows(one_by_one, asked, asked="one after another", sequences=asked)
        trial.lm.clear_cache()
        together = trial.run(trial.lm.batch_next_token_logprobs(asked))
        trial.check_rows(together, asked, asked="together", sequences=asked)

    # Short ones first: to a model with a short window, long near misses are all the same.
    for position, token_ids in enumerate(trial.some_sequences(15)):
        law((token_ids * 3)[: min(2 + position % 5, trial.max_length)])
    trial.for_all(law, token_ids=trial.sequences())
    # Not of every kind: a bigram model's rows are those of the last token, whatever precedes.
    expect(
        trial.cases["another row"] > 0,
        "near misses that have another row than the sequence, by the oracle",
        "none, and so no wrong row; certify a model whose rows depend on its tokens",
    )


@engine_check(cases=("extended", "forked", "back to an earlier prefix"))
def prefixes_equal_fresh_evaluation(trial: EngineTrial) -> None:
    """A sequence grown token by token, forked, or cut back has the row of a fresh one."""

    def law(token_ids: TokenTuple, other: TokenTuple, fork: int) -> None:
        trial.lm.clear_cache()
        grown = [token_ids[:length] for length in range(1, len(token_ids) + 1)]
        for prefix in grown:
            _check_alone(trial, prefix, "extended")
        kept = token_ids[: fork % len(token_ids)]
        forks = [(*kept, token_id) for token_id in (*other, *token_ids)][: trial.max_length]
        rows = trial.run(trial.lm.batch_next_token_logprobs(forks))
        trial.check_rows(rows, forks, how="forked", grown_from=token_ids)
        trial.saw("forked", len(kept) > 0 and len(set(forks)) > 1)
        for prefix in (kept + other)[: trial.max_length], grown[len(kept)]:
            _check_alone(trial, prefix, "back to an earlier prefix")

    trial.for_all(
        law,
        token_ids=trial.sequences(),
        other=trial.sequences(),
        fork=trial.lengths(),
    )


def _check_alone(trial: EngineTrial, token_ids: TokenTuple, how: str) -> None:
    row = trial.run(trial.lm.next_token_logprobs_uncached(token_ids))
    trial.check_row(row, token_ids, how=how)
    trial.saw(how, len(token_ids) > 1)


@engine_check(cases=("more prefixes than fit",))
def tight_budgets_change_nothing(trial: EngineTrial) -> None:
    """Answers are the same when the engine's own caches have room for next to nothing."""
    variants = trial.target.tight_variants
    if not variants:
        if Capability.PREFIX_CACHE in trial.lm.capabilities:
            raise Skipped("the target names no tight_options for its prefix cache")
        raise NotApplicable("the target names no tight_options, so the engine has no caches")
    roots = trial.some_sequences(4)
    for options in variants:
        lm = trial.load(engine_options=options, output_cache=OutputCache(1))
        for length in [*range(1, trial.max_length + 1), 1, trial.max_length]:
            asked = [root[:length] for root in roots]
            rows: torch.Tensor = trial.run(lm.batch_next_token_logprobs(asked))
            trial.check_rows(rows, asked, engine_options=options, batch=asked)
            # What was evaluated last is still kept in part: found again, it must be right.
            for token_ids in (asked[-1], asked[0]):
                row = trial.run(lm.next_token_logprobs_uncached(token_ids))
                trial.check_row(row, token_ids, engine_options=options, after=asked)
        trial.saw("more prefixes than fit")


@engine_check(needs=Capability.PREFIX_CACHE, cases=("asked below a kept prefix", "cleared"))
def kept_prefixes_change_nothing(trial: EngineTrial) -> None:
    """Keeping a prefix with `cache_kv`, keeping it twice and freeing it change no answer."""

    def law(prefix: TokenTuple, other: TokenTuple) -> None:
        trial.lm.clear_cache()
        asked = [prefix, (prefix + other)[: trial.max_length], prefix[:1] + other[1:], other]
        for kept in (prefix, prefix, (prefix + other)[: trial.max_length]):
            trial.call(functools.partial(trial.lm.cache_kv, kept))
            for token_ids in asked:
                row = trial.run(trial.lm.next_token_logprobs_uncached(token_ids))
                trial.check_row(row, token_ids, kept=kept)
        trial.saw("asked below a kept prefix")
        trial.call(trial.lm.clear_kv_cache)
        for token_ids in asked:
            row = trial.run(trial.lm.next_token_logprobs_uncached(token_ids))
            trial.check_row(row, token_ids, freed=prefix)
        trial.saw("cleared")

    trial.for_all(law, prefix=trial.sequences(shorter_by=1), other=trial.sequences())


@engine_check(unless=Capability.PREFIX_CACHE, cases=("refused",))
def undeclared_prefix_cache_is_refused(trial: EngineTrial) -> None:
    """Without `prefix_cache` declared, `cache_kv` and `clear_kv_cache` are refused."""
    calls = {
        "cache_kv": lambda: trial.lm.cache_kv(trial.some_sequences(1)[0]),
        "clear_kv_cache": trial.lm.clear_kv_cache,
    }
    for name, call in calls.items():
        trial.expect_error(UnsupportedCapability, call, call=name)
        trial.saw("refused")
