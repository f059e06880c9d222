"""`TokenSequence`: equal ids give equal keys, whatever the pieces they were made of."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.queries.sequence import BLOCK_TOKENS, TokenSequence, pack_sequences

B = BLOCK_TOKENS
LENGTHS = [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B + 7]

ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)


@given(pieces=st.lists(st.integers(1, 2 * B + 3), min_size=1, max_size=6), seed=ids)
def test_the_pieces_make_no_difference(pieces: list[int], seed: list[int]) -> None:
    whole = [seed[i % len(seed)] ^ (i // len(seed)) for i in range(sum(pieces))]
    sequence, end = None, 0
    for count in pieces:
        sequence = TokenSequence.of(whole[end : end + count], sequence)
        end += count
        assert sequence == TokenSequence.of(whole[:end])
        assert hash(sequence) == hash(TokenSequence.of(whole[:end]))
        assert len(sequence) == end
    assert sequence.token_ids == tuple(whole)


@pytest.mark.parametrize("length", LENGTHS)
def test_keys_of_prefixes_and_last_ids(length: int) -> None:
    whole = list(range(1000, 1000 + length))
    sequence = TokenSequence.of(whole)
    for prefix in {1, length, max(1, length - 1), *(n for n in LENGTHS if n <= length)}:
        assert sequence.prefix_key(prefix) == TokenSequence.of(whole[:prefix]).key
        shorter = sequence.prefix(prefix)
        assert shorter == TokenSequence.of(whole[:prefix])
        assert shorter.token_ids == tuple(whole[:prefix])
        assert len(shorter) == prefix
        assert TokenSequence.of([7], shorter) == TokenSequence.of([*whole[:prefix], 7])
    assert sequence.prefix_key(0) == b""
    for start in {0, 1 % length, length - 1, *(n for n in LENGTHS if n < length)}:
        assert sequence.ids_from(start) == tuple(whole[start:])


@pytest.mark.parametrize("length", LENGTHS)
def test_other_ids_have_other_keys(length: int) -> None:
    whole = list(range(length))
    sequence = TokenSequence.of(whole)
    for place in {0, length // 2, length - 1}:
        other = [*whole[:place], whole[place] + 1, *whole[place + 1 :]]
        assert TokenSequence.of(other) != sequence
    assert TokenSequence.of([*whole, 0]) != sequence
    assert TokenSequence.of([0, *whole]) != sequence
    if length > 1:
        assert TokenSequence.of(whole[1:]) != sequence


def test_extensions_do_not_change_what_they_extend() -> None:
    for length in LENGTHS:
        parent = TokenSequence.of(range(length))
        children = [TokenSequence.of([i] * (B + 1), parent) for i in range(3)]
        assert parent.token_ids == tuple(range(length))
        assert len({child.key for child in children}) == 3
        for i, child in enumerate(children):
            assert child.token_ids == (*range(length), *[i] * (B + 1))


def test_keys_are_small_and_exact_for_short_sequences() -> None:
    assert TokenSequence.of([1, 2]).key == (1).to_bytes(4, sys.byteorder) + (2).to_bytes(
        4, sys.byteorder
    )
    assert max(len(TokenSequence.of(range(n)).key) for n in LENGTHS) <= 4 * B + 17


def test_the_cost_of_an_extension_does_not_grow_with_the_length() -> None:
    """Counted in bytes that are hashed and copied, not in time."""
    short, long = TokenSequence.of(range(B + 1)), TokenSequence.of(range(100 * B + 1))
    for sequence in (short, long):
        child = TokenSequence.of([1], sequence)
        assert child._block is sequence._block  # shared, not copied
        assert len(child._tail) == 8


def test_keys_differ_between_processes() -> None:
    """So that nobody can prepare two sequences with the same key."""
    program = (
        "from genlm.core.queries.sequence import TokenSequence;"
        f"print(TokenSequence.of(range({3 * B})).key.hex())"
    )
    key = TokenSequence.of(range(3 * B)).key.hex()
    other = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert key != other
    assert key[34:] == other[34:]  # the ids of the tail


@pytest.mark.parametrize("length", LENGTHS)
def test_a_packed_sequence_arrives_alone(length: int) -> None:
    sequence = TokenSequence.of(range(length))
    [arrived] = pack_sequences([sequence]).unpack()
    assert arrived == sequence
    assert arrived.token_ids == sequence.token_ids
    assert len(arrived) == length
    assert repr(arrived) == repr(sequence)


@pytest.mark.parametrize("length", [1, 5, 8, 9])
def test_a_sequence_is_printed_with_its_last_ids_and_equals_no_other_object(
    length: int,
) -> None:
    sequence = TokenSequence.of(range(length))
    last = ", ".join(map(str, range(length)[-8:]))
    assert repr(sequence) == f"<TokenSequence of {length} ids, the last of which are {last}>"
    assert sequence != tuple(range(length))


def test_packed_sequences_arrive_as_they_were_and_shared_blocks_are_packed_once() -> None:
    prompt = TokenSequence.of(range(3 * B + 1))
    sequences = [TokenSequence.of([i] * length, prompt) for i in range(3) for length in LENGTHS]
    sequences += [TokenSequence.of(range(length)) for length in LENGTHS]
    packed = pack_sequences([prompt, *sequences])
    arrived = packed.unpack()
    assert arrived == [prompt, *sequences]
    assert [sequence.token_ids for sequence in arrived[1:]] == [
        sequence.token_ids for sequence in sequences
    ]
    assert [len(sequence) for sequence in arrived[1:]] == [
        len(sequence) for sequence in sequences
    ]
    child = TokenSequence.of([5] * (2 * B), arrived[1])
    assert child == TokenSequence.of([5] * (2 * B), sequences[0])
    children = [TokenSequence.of([i], prompt) for i in range(9)]
    assert len(pack_sequences(children).blocks) == 3
