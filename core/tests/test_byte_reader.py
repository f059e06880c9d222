"""`ByteReader` against sums over all token sequences that spell a text."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import genlm
from genlm.core.vocab.per_vocabulary import MAX_VALUES
from genlm.plugin import BatchEngine, Query, Vocabulary

TEXTS = [b"<end>", b"a", b"b", b"ab", b"ba", b"aba", b"<pad>", b"ab", b""]
EOS, PAD, MISSING = 0, 6, 8
STOP = genlm.ByteReader.STOP


def row(token_ids: Sequence[int]) -> np.ndarray:
    """A random row, determined by the ids."""
    logits = np.random.default_rng([2, *token_ids]).normal(scale=1.5, size=len(TEXTS))
    logits[MISSING] = -np.inf
    weights = np.exp(logits)
    return weights / weights.sum()


class RandomEngine(BatchEngine):
    """Nine ids, two with equal bytes, two special, one missing; each row is random."""

    def __init__(self) -> None:
        tokens = [genlm.Token(index, text) for index, text in enumerate(TEXTS)]
        tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
        self.vocabulary = Vocabulary(tokenizer, tokens, list(map(repr, TEXTS)), (MISSING,))

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        rows = np.stack([row(query.token_ids) for query in queries])
        return torch.from_numpy(rows).log().float()


class SpacedEngine(RandomEngine):
    """The same rows for tokens with spaces; the tokenizer adds a space to every text."""

    TEXTS = tuple(text.replace(b"b", b" ") for text in TEXTS)

    def __init__(self) -> None:
        tokens = [genlm.Token(index, text) for index, text in enumerate(self.TEXTS)]
        tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD, encode=self.encode)
        self.vocabulary = Vocabulary(tokenizer, tokens, list(map(repr, self.TEXTS)), (MISSING,))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert (text, add_special_tokens) == ("a", False)
        return [self.TEXTS.index(b" a")]


def mass_after(
    token_ids: tuple[int, ...], text: bytes, texts: Sequence[bytes] = TEXTS
) -> np.ndarray:
    """Probability of the text followed by each byte or the end, by a model without `PAD`."""
    mass, probabilities = np.zeros(257), row(token_ids)
    probabilities[PAD] = 0
    probabilities /= probabilities.sum()
    for token, written in enumerate(texts):
        if token == EOS:
            mass[STOP] += probabilities[token] * (text == b"")
        elif token in {PAD, MISSING}:
            continue
        elif len(written) > len(text) and written.startswith(text):
            mass[written[len(text)]] += probabilities[token]
        elif text.startswith(written):
            longer = (*token_ids, token)
            mass += probabilities[token] * mass_after(longer, text[len(written) :], texts)
    return mass


@pytest.fixture
def llm():
    with genlm.AsyncLM(RandomEngine) as llm:
        yield llm


async def reading(llm: genlm.AsyncLM, text: bytes, **options: object) -> genlm.ByteReader:
    reader = genlm.ByteReader(llm, **options)
    await reader.start([1, 2])
    await reader.read(text)
    return reader


@pytest.mark.parametrize("text", [b"", b"a", b"ab", b"abab", b"baba", b"aabbabab"])
def test_next_bytes_are_sums_over_all_tokenizations(llm, text):
    reader = asyncio.run(reading(llm, text, width=10_000))
    expected = mass_after((1, 2), text)
    np.testing.assert_allclose(reader.probabilities(), expected / expected.sum(), atol=1e-6)


def test_blocking_calls_read_the_same_bytes(llm):
    expected = asyncio.run(reading(llm, b"abab"))

    async def in_a_loop() -> genlm.ByteReader:
        reader = genlm.ByteReader(llm)
        reader.start_sync([1, 2])
        reader.read_sync(b"abab")
        return reader

    found = asyncio.run(in_a_loop())
    assert found.logprob == expected.logprob
    np.testing.assert_array_equal(found.probabilities(), expected.probabilities())


def test_the_probability_of_the_text_is_the_product_of_its_bytes(llm):
    reader = asyncio.run(reading(llm, b"abba", width=10_000))
    expected = 0.0
    for end, byte in enumerate(b"abba"):
        mass = mass_after((1, 2), b"abba"[:end])
        expected += math.log(mass[byte] / mass.sum())
    assert reader.logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("text", [b"", b"a", b" a", b"a aa "])
def test_a_space_that_the_tokenizer_adds_is_no_part_of_a_text_that_begins(text):
    expected = mass_after((EOS,), b" " + text, SpacedEngine.TEXTS)
    if text[:1] != b" ":
        without_space = mass_after((EOS,), text, SpacedEngine.TEXTS)
        without_space[ord(" ")] *= text != b""
        expected += without_space
    with genlm.AsyncLM(SpacedEngine) as llm:
        reader = genlm.ByteReader(llm, width=10_000)
        reader.start_sync([EOS])
        reader.read_sync(text)
        assert reader.is_exact
        assert math.exp(reader.logprob) == pytest.approx(expected.sum(), abs=1e-6)
        found = reader.probabilities()
        np.testing.assert_allclose(found, expected / expected.sum(), atol=1e-6)
        reader.start_sync([EOS, 1])  # a prompt
        prompted = mass_after((EOS, 1), b"", SpacedEngine.TEXTS)
        np.testing.assert_allclose(reader.probabilities(), prompted, atol=1e-6)
        narrow = genlm.ByteReader(llm, width=1)
        narrow.start_sync([EOS])
        assert not narrow.is_exact


def tokenizations(
    token_ids: tuple[int, ...], text: bytes, texts: Sequence[bytes] = TEXTS
) -> dict[tuple[int, ...], float]:
    """Probabilities of the shortest sequences of tokens that begin with a text."""
    if not text:
        return {token_ids: 1.0}
    probabilities = row(token_ids)
    probabilities[PAD] = 0
    probabilities /= probabilities.sum()
    found = {}
    for token, written in enumerate(texts):
        if token in {EOS, PAD, MISSING}:
            continue
        if written.startswith(text):
            found[*token_ids, token] = probabilities[token]
        elif text.startswith(written):
            longer = tokenizations((*token_ids, token), text[len(written) :], texts)
            found |= {ids: probabilities[token] * mass for ids, mass in longer.items()}
    return found


@pytest.mark.parametrize("text", [b"", b"a", b"ab", b"abab", b"baba"])
def test_populations_have_the_distribution_of_tokenizations(llm, text):
    expected, size = tokenizations((1, 2), text), 100_000
    reader = asyncio.run(reading(llm, text, width=10_000))
    total = sum(expected.values())
    assert math.exp(reader.logprob) == pytest.approx(total, abs=1e-6)
    population = reader.population(size, seed=1)
    lengths, counts = population.lengths, dict.fromkeys(expected, 0)
    for ids, length in zip(population.tokens.tolist(), lengths.tolist(), strict=True):
        counts[tuple(ids[:length])] += 1  # no other sequence is drawn
    for ids, probability in expected.items():
        share = probability / total
        error = 5 * math.sqrt(share * (1 - share) / size)
        assert counts[ids] / size == pytest.approx(share, abs=error + 1e-9)


def test_populations_are_those_of_their_seed_and_change_nothing(llm):
    reader = asyncio.run(reading(llm, b"aba", width=10_000))
    before = reader.probabilities()
    first, again, other = (reader.population(50, seed=seed).tokens for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(reader.population(50).tokens, reader.population(50).tokens)
    np.testing.assert_array_equal(reader.probabilities(), before)
    assert len(reader.population(0)) == 0
    with pytest.raises(ValueError, match="size=-1"):
        reader.population(-1)


def test_the_members_of_a_small_beam_begin_with_the_text(llm):
    population = asyncio.run(reading(llm, b"abab", width=1)).population(20, seed=0)
    assert all(
        b"".join(TEXTS[token] for token in member.token_ids[2:]).startswith(b"abab")
        for member in population
    )
    assert (population.draw_sync(seed=0).token_ids >= 0).all()


def test_the_end_of_a_text_may_be_another_token_or_none(llm):
    reader = asyncio.run(reading(llm, b"", stop=[PAD]))
    mass = row((1, 2))
    assert reader.probabilities()[STOP] == pytest.approx(
        mass[PAD] / (mass.sum() - mass[EOS]), abs=1e-6
    )
    reader = asyncio.run(reading(llm, b"", stop=[EOS, PAD]))
    assert reader.probabilities()[STOP] == pytest.approx(mass[EOS] + mass[PAD], abs=1e-6)
    reader = asyncio.run(reading(llm, b"", stop=()))
    assert reader.probabilities()[STOP] == 0


def test_ends_are_one_or_several_ids(llm):
    expected = asyncio.run(reading(llm, b"ab", stop=[PAD])).probabilities()
    for stop in (PAD, {PAD}, torch.tensor([PAD])):
        reader = asyncio.run(reading(llm, b"ab", stop=stop))
        np.testing.assert_array_equal(reader.probabilities(), expected)
    with pytest.raises(TypeError, match="expected token ids, not texts"):
        genlm.ByteReader(llm, stop="a")


class TokenWithoutBytesEngine(RandomEngine):
    """The id without bytes has a token."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = replace(self.vocabulary, missing_ids=())

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        rows = super().evaluate(queries).exp() / 2
        rows[:, MISSING] = 0.5
        return rows.log()


def test_a_token_without_bytes_is_excluded(llm):
    expected = asyncio.run(reading(llm, b"abab"))
    with genlm.AsyncLM(TokenWithoutBytesEngine) as other:
        reader = asyncio.run(reading(other, b"abab"))
    np.testing.assert_allclose(reader.probabilities(), expected.probabilities(), atol=1e-6)
    assert reader.logprob == pytest.approx(expected.logprob, abs=1e-5)


class SpecialAfterAEngine(RandomEngine):
    """Predicts only `PAD` after a token that ends in a."""

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        rows = super().evaluate(queries)
        for logprobs, query in zip(rows, queries, strict=True):
            if TEXTS[query.token_ids[-1]].endswith(b"a"):
                logprobs[:] = -math.inf
                logprobs[PAD] = 0
        return rows


def test_a_text_that_only_special_tokens_continue_is_an_error() -> None:
    with genlm.AsyncLM(SpecialAfterAEngine) as llm:
        reader = genlm.ByteReader(llm)
        reader.start_sync([1])
        with pytest.raises(ValueError, match="the model predicts only tokens without bytes"):
            reader.probabilities()
        reader.start_sync([2])
        reader.read_sync(b"a")  # also the beginning of "ab"
        assert reader.probabilities()[ord("b")] == pytest.approx(1)
        reader.read_sync(b"ba")
        assert np.isfinite(reader.logprob)
        reader = asyncio.run(reading(llm, b"", stop=[PAD]))
        assert reader.probabilities().sum() == pytest.approx(1)


def test_a_reader_starts_at_a_context_and_again(llm):
    async def read() -> genlm.ByteReader:
        reader = await reading(llm, b"bab")
        await reader.start(llm.context([1, 2]))
        await reader.read(b"ab")
        return reader

    again, fresh = asyncio.run(read()), asyncio.run(reading(llm, b"ab"))
    np.testing.assert_array_equal(again.probabilities(), fresh.probabilities())
    assert again.logprob == fresh.logprob


def test_readers_share_a_trie_until_the_vocabulary_is_freed(monkeypatch):
    built = []

    class Trie(genlm.TokenCharacterTrie):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            assert options == {"compiled": False}, "readers reduce few nodes"
            built.append(weakref.ref(self))

    monkeypatch.setattr("genlm.byte_reader.TokenCharacterTrie", Trie)
    with genlm.AsyncLM(RandomEngine) as llm:
        readers = [genlm.ByteReader(llm), genlm.ByteReader(llm, 2, stop=EOS)]
        assert len(built) == 1
        readers.append(genlm.ByteReader(llm, stop=()))
        assert len(built) == 2
    del llm, readers
    gc.collect()
    assert [trie() for trie in built] == [None, None]


def test_the_tries_of_the_most_recently_used_ends_are_stored(llm):
    tries = [weakref.ref(genlm.ByteReader(llm)._trie)]
    for ends in itertools.combinations(range(len(TEXTS)), 2):
        tries.append(weakref.ref(genlm.ByteReader(llm, stop=ends)._trie))
        assert genlm.ByteReader(llm)._trie is tries[0]()
    gc.collect()
    assert sum(trie() is not None for trie in tries) == MAX_VALUES


def test_copies_go_on_independently(llm):
    async def read() -> list[genlm.ByteReader]:
        reader = await reading(llm, b"a")
        other = reader.copy()
        await asyncio.gather(reader.read(b"b"), other.read(b"a"))
        return [reader, other, await reading(llm, b"ab"), await reading(llm, b"aa")]

    one, two, *fresh = asyncio.run(read())
    for found, expected in zip((one, two), fresh, strict=True):
        np.testing.assert_array_equal(found.probabilities(), expected.probabilities())


def test_a_second_call_at_the_same_time_is_refused(llm):
    async def read() -> genlm.ByteReader:
        llm.clear_output_cache()  # a request that waits
        reader = await reading(llm, b"a")
        reading_b = asyncio.create_task(reader.read(b"b"))
        await asyncio.sleep(0)
        for call in (reader.read(b"a"), reader.start([1])):
            with pytest.raises(RuntimeError, match=r"is running: await it first, or .*copy"):
                await call
        copied = reader.copy()  # of the state after b"a"
        await asyncio.gather(reading_b, copied.read(b"b"))
        np.testing.assert_array_equal(copied.probabilities(), reader.probabilities())
        return reader

    found, fresh = asyncio.run(read()), asyncio.run(reading(llm, b"ab"))
    np.testing.assert_array_equal(found.probabilities(), fresh.probabilities())
    assert found.logprob == fresh.logprob


def test_a_full_beam_keeps_the_likeliest_and_goes_on(llm):
    reader = asyncio.run(reading(llm, b"abab" * 20, width=2))
    assert reader.probabilities().sum() == pytest.approx(1)
    assert -160 < reader.logprob < 0
    with pytest.raises(ValueError, match="begins with it; a width above 2 may contain one"):
        reader.read_sync(b"x")


@pytest.mark.parametrize("options", [{"width": 4}, {"prune_threshold": 0.5}])
def test_a_reader_is_exact_until_a_hypothesis_is_removed(llm, options):
    """The text "ab" has five hypotheses, of which two are within a token."""
    exact = asyncio.run(reading(llm, b"ab", width=5))
    assert exact.is_exact
    reader = asyncio.run(reading(llm, b"a", **options))
    assert reader.is_exact
    before = reader.copy()
    reader.read_sync(b"b")
    assert not reader.is_exact
    assert before.is_exact
    assert reader.logprob == exact.logprob
    reader.start_sync([1, 2])
    assert reader.is_exact


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_full_beam_continues_with_every_byte_that_begins_a_token(llm, width):
    async def read() -> None:
        for letters in itertools.product("ab", repeat=5):
            reader = await reading(llm, "".join(letters).encode(), width=width)
            assert reader.probabilities()[list(b"ab")].min() > 0

    asyncio.run(read())


@pytest.mark.parametrize(("threshold", "count"), [(0.0, 5), (0.08, 4), (0.2, 3), (0.5, 3)])
def test_hypotheses_below_the_threshold_are_removed(llm, threshold, count):
    after_nothing, after_a = (
        probabilities / (1 - probabilities[PAD])
        for probabilities in (row([1, 2]), row([1, 2, 1]))
    )
    # "ab" is each of two tokens, "a" and "b", part of "aba", and "a" and part of "ba".
    complete = {(3,): after_nothing[3], (7,): after_nothing[7]}
    complete[(1, 2)] = after_nothing[1] * after_a[2]
    partial = [after_nothing[5], after_nothing[1] * after_a[4]]
    masses = [*complete.values(), *partial]
    kept = {mass for mass in masses if mass >= threshold * max(masses)}
    kept.add(max(complete.values()))
    assert len(kept) == count
    expected = np.zeros(257)
    for ids, mass in complete.items():
        expected += mass * mass_after((1, 2, *ids), b"") * (mass in kept)
    expected[ord("a")] += sum(mass for mass in partial if mass in kept)
    reader = asyncio.run(reading(llm, b"ab", prune_threshold=threshold))
    np.testing.assert_allclose(reader.probabilities(), expected / sum(kept), atol=1e-6)


def test_no_threshold_removes_the_only_hypothesis_that_continues(llm):
    reader = asyncio.run(reading(llm, b"abbaab", width=1, prune_threshold=1))
    assert reader.probabilities()[list(b"ab")].min() > 0


@pytest.mark.parametrize("threshold", [-0.1, 1.5, math.nan])
def test_a_threshold_is_a_share(llm, threshold):
    with pytest.raises(ValueError, match="prune_threshold="):
        genlm.ByteReader(llm, prune_threshold=threshold)


def test_a_byte_that_no_token_writes_is_an_error_and_changes_nothing(llm):
    async def read() -> genlm.ByteReader:
        reader = await reading(llm, b"a")
        with pytest.raises(
            ValueError, match=r"b'x', and no token .* begins with it; the model cannot write"
        ):
            await reader.read(b"bx")
        return reader

    found, fresh = asyncio.run(read()), asyncio.run(reading(llm, b"ab"))
    np.testing.assert_array_equal(found.probabilities(), fresh.probabilities())
    assert found.logprob == fresh.logprob


def test_a_failed_start_changes_nothing(llm):
    async def read() -> genlm.ByteReader:
        reader = await reading(llm, b"ab")
        with pytest.raises(genlm.TokenIdError):
            await reader.start([10**6])
        with (
            genlm.load_model("demo", "reference") as other,
            pytest.raises(ValueError, match="belongs to a different model"),
        ):
            await reader.start(other.context([1]))
        return reader

    found, fresh = asyncio.run(read()), asyncio.run(reading(llm, b"ab"))
    np.testing.assert_array_equal(found.probabilities(), fresh.probabilities())
    assert found.logprob == fresh.logprob


def test_a_reader_describes_itself(llm):
    assert repr(genlm.ByteReader(llm, 3)) == "<ByteReader of width 3: not started>"
    reader = asyncio.run(reading(llm, b"ab", width=3))
    logprob = f"{reader.logprob:.4f}"
    assert repr(reader) == f"<ByteReader of width 3: 3 hypotheses, logprob {logprob}>"


def test_a_reader_that_was_not_started_says_so(llm):
    reader = genlm.ByteReader(llm)
    with pytest.raises(RuntimeError, match=r"await reader.start\(token_ids\)"):
        reader.probabilities()
    with pytest.raises(RuntimeError, match="not started"):
        reader.population(10)
    with pytest.raises(RuntimeError, match="not started"):
        asyncio.run(reader.read(b"a"))


def test_a_beam_without_room_is_refused(llm):
    with pytest.raises(ValueError, match="width=0"):
        genlm.ByteReader(llm, width=0)
    with pytest.raises(TypeError, match=r"width=2\.5; expected an integer"):
        genlm.ByteReader(llm, width=2.5)


@pytest.mark.parametrize("token_id", [-1, len(TEXTS)])
def test_an_end_outside_the_vocabulary_is_refused(llm, token_id):
    with pytest.raises(genlm.TokenIdError, match=f"{token_id} at position 1 of stop"):
        genlm.ByteReader(llm, stop=[EOS, token_id])


def test_text_is_refused():
    async def main():
        with genlm.AsyncLM(RandomEngine) as llm:
            reader = genlm.ByteReader(llm)
            await reader.start([1])
            with pytest.raises(TypeError, match="expected bytes, such as b'The'; found 'ab'"):
                await reader.read("ab")

    asyncio.run(main())
