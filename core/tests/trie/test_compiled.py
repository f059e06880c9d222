"""Compiled tries give equal results; a trie decides when it is built whether to compile."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import run_code

from genlm import MissingRequirementError, Token, TokenCharacterTrie
from genlm.core.trie import compiled
from genlm.testing.strategies import vocabularies

OPERATIONS = ["sum", "max", "logsumexp"]
VOCAB = [Token(i, b"%d" % i) for i in range(300)]
NUMBERS = st.one_of(st.floats(width=32), st.floats(-50, 0, width=32))


@pytest.fixture
def without_numba(monkeypatch):
    compiled.compiled_take.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)


@pytest.mark.parametrize("operation", OPERATIONS)
@given(items=vocabularies(other_items=True), data=st.data())
def test_answers_are_those_of_numpy_bit_for_bit(operation, items, data) -> None:
    weights = data.draw(st.lists(NUMBERS, min_size=2 * len(items), max_size=2 * len(items)))
    tries = [TokenCharacterTrie(items, compiled=choice) for choice in (False, True)]
    assert [trie.compiled for trie in tries] == [False, True]
    for dtype in (np.float32, np.float64):
        ws = np.array(weights, dtype).reshape(2, -1)
        expected, values = (getattr(trie, f"batch_weight_{operation}")(ws) for trie in tries)
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_strided_and_read_only_weights_are_fine(operation) -> None:
    ws = np.random.default_rng(0).random((300, 4)).T
    ws.flags.writeable = False
    expected, values = (
        getattr(TokenCharacterTrie(VOCAB, compiled=choice), f"batch_weight_{operation}")(ws)
        for choice in (False, True)
    )
    np.testing.assert_array_equal(values, expected)


def test_large_tries_are_compiled_when_they_are_built(monkeypatch) -> None:
    n_nodes = len(TokenCharacterTrie(VOCAB))
    for limit, expected in [(n_nodes, True), (n_nodes + 1, False)]:
        monkeypatch.setattr(compiled, "COMPILED_FROM_NODES", limit)
        trie = TokenCharacterTrie(VOCAB)
        assert trie.compiled == expected
        trie.batch_weight_sum(np.ones((100, 300)))
        assert trie.compiled == expected


def test_threads_share_a_trie_that_is_used_for_the_first_time() -> None:
    ws = np.random.default_rng(0).random((40, 300))
    expected = TokenCharacterTrie(VOCAB, compiled=False).batch_weight_sum(ws)
    trie = TokenCharacterTrie(VOCAB, compiled=True)
    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_array_equal(list(pool.map(trie.weight_sum, ws)), expected)


@pytest.mark.usefixtures("without_numba")
def test_large_tries_use_numpy_where_numba_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM_NODES", 0)
    trie = TokenCharacterTrie(VOCAB)
    assert trie.weight_sum(np.ones(300))[trie.root] == 300
    assert not trie.compiled


@pytest.mark.usefixtures("without_numba")
def test_compiling_without_numba_says_what_to_install() -> None:
    with pytest.raises(MissingRequirementError, match=r"pip install genlm-core\[numba\]"):
        TokenCharacterTrie(VOCAB, compiled=True)


def test_a_large_trie_is_not_compiled_on_request(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED_FROM_NODES", 0)
    assert not TokenCharacterTrie(VOCAB, compiled=False).compiled


def test_numba_is_not_imported_for_a_small_trie() -> None:
    program = (
        "import sys; from genlm import TokenCharacterTrie;"
        "TokenCharacterTrie([b'a', b'b']).weight_sum([1.0, 2.0]);"
        "assert 'numba' not in sys.modules"
    )
    run_code(program)
