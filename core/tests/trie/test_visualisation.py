"""Pictures show what is there, the heaviest first, and say what they leave out."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest

from genlm import MissingRequirementError, Token, TokenCharacterTrie, WeightsError
from genlm.core.trie import visualisation
from genlm.core.trie.visualisation import (
    dot_source,
    edge_label,
    node_values,
    visible_nodes,
)
from genlm.testing.strategies import EOS


def text(trie: TokenCharacterTrie, ws=None, max_nodes: int = 200) -> list[str]:
    """Format the visible nodes as indented text; symbols without a branch share a line."""
    values = node_values(trie, ws)
    visible = visible_nodes(trie, values, max_nodes)

    def lines(node: int, indent: str) -> Iterator[str]:
        children, collapsed = visible.get(node, ([], 0))
        rows: list[int | None] = [*children, *([None] if collapsed else [])]
        for child in rows:
            last = child is rows[-1]
            branch = "└─ " if last else "├─ "
            if child is None:
                more = "token" if collapsed == 1 else "tokens"
                yield f"{indent}{branch}… {collapsed} more {more}"
                continue
            edge, end = unbranched(child)
            yield f"{indent}{branch}{edge}  {values[end]:.4g}"
            yield from lines(end, indent + ("   " if last else "│  "))

    def unbranched(node: int) -> tuple[str, int]:
        """Join a node with its descendants up to the next branch or token into one edge."""
        end = node
        while True:
            children, collapsed = visible.get(end, ([], 0))
            if len(children) != 1 or collapsed or trie.is_leaf(children[0]):
                break
            if values[children[0]] != values[node]:
                break
            end = children[0]
        if trie.is_leaf(node):
            return edge_label(trie, node), node
        start = len(trie.prefix_of(node)) - 1
        return visualisation._readable(trie.prefix_of(end)[start:]), end

    return [f"root  {values[trie.root]:.4g}", *lines(trie.root, "")]


def drawn(trie: TokenCharacterTrie, ws, max_nodes: int) -> str:
    return dot_source(trie, ws, visible_nodes(trie, ws, max_nodes))


def trie_of(*words: bytes) -> TokenCharacterTrie:
    return TokenCharacterTrie([Token(i, word) for i, word in enumerate(words)])


def test_a_small_trie_is_drawn_whole() -> None:
    trie = trie_of(b"a", b"ab", b"\xff ")
    assert text(trie, trie.weight_sum([0.5, 0.25, 0.25])) == [
        "root  1",
        "├─ a  0.75",
        "│  ├─ end 0  0.5",
        "│  └─ b  0.25",
        "│     └─ end 1  0.25",
        "└─ \\xff\\x20  0.25",
        "   └─ end 2  0.25",
    ]


def test_symbols_without_a_branch_share_a_line_as_the_text_they_are() -> None:
    trie = TokenCharacterTrie(["naïve".encode(), "日本".encode(), "日".encode(), (EOS, 97)])
    assert text(trie) == [
        "root  4",
        "├─ naïve  1",
        "│  └─ end 0  1",
        "├─ 日  2",
        "│  ├─ end 2  1",
        "│  └─ 本  1",
        "│     └─ end 1  1",
        f"└─ {EOS}a  1",
        "   └─ end 3  1",
    ]


def test_integers_that_are_no_bytes_are_shown_as_numbers() -> None:
    trie = TokenCharacterTrie([(256, 97), (-1,)])
    assert text(trie)[1::2] == ["├─ 256a  1", "└─ -1  1"]


def test_symbols_of_other_weights_keep_their_lines() -> None:
    trie = trie_of(b"abc")
    ws = trie.weight_sum([1.0])
    ws[trie.node_of(b"abc")] = 2
    assert text(trie, ws)[1:3] == ["└─ ab  1", "   └─ c  2"]


def test_without_weights_nodes_show_how_many_tokens_are_below() -> None:
    assert text(trie_of(b"a", b"ab"))[:2] == ["root  2", "└─ a  2"]


def test_light_children_are_folded_into_their_number_of_tokens() -> None:
    trie = trie_of(*(bytes([65 + i, 65]) for i in range(26)))
    ws = trie.weight_sum(np.arange(26.0))
    lines = text(trie, ws)
    assert "└─ … 10 more tokens" in lines
    assert not any(line.startswith("├─ AA ") for line in lines)
    assert any(line.startswith("├─ ZA  25") for line in lines)


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 50])
def test_the_limit_holds_and_no_token_is_lost(max_nodes) -> None:
    rng = np.random.default_rng(0)
    words = sorted({bytes(rng.integers(97, 100, size=rng.integers(0, 6))) for _ in range(90)})
    trie = trie_of(*words)
    lines = text(trie, max_nodes=max_nodes)
    folded = sum(int(n) for n in re.findall(r"… (\d+) more", "\n".join(lines)))
    leaves = sum(" end " in line for line in lines)
    assert sum("…" not in line for line in lines) <= max_nodes
    assert folded + leaves == len(words)


@pytest.mark.parametrize("max_nodes", [0, -3])
def test_a_limit_that_leaves_nothing_to_draw_is_refused(max_nodes) -> None:
    with pytest.raises(ValueError, match=f"max_nodes={max_nodes}; it must be 1 or more"):
        trie_of(b"a", b"b").visualize(max_nodes=max_nodes)


def test_the_source_colours_by_weight_and_marks_leaves_and_folds() -> None:
    trie = trie_of(b'"', b"b", b"c")
    ws = trie.weight_sum([0.0, 1.0, 1.0])
    source = drawn(trie, ws, 4)
    assert source.startswith("digraph trie {")
    assert (
        f'n{trie.root} [label="root\\n2" fillcolor="0.33 1.000 1.0" peripheries=1];' in source
    )
    node = trie.node_of(b"b")
    assert f'n{node} [label="b\\n1" fillcolor="0.33 0.500 1.0" peripheries=1];' in source
    assert f'n{trie.root} -> n{node} [label="b"];' in source
    whole = drawn(trie, ws, 100)
    assert 'n0 [label="\\"\\n0" fillcolor="0.33 0.000 1.0" peripheries=2];' in whole
    assert 'label="… 1 more token"' in drawn(trie, ws, 3)


def test_odd_weights_can_be_drawn() -> None:
    trie = trie_of(b"a", b"b", b"c", b"d")
    for odd in ([np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-1, -2, -3, -4], [0, 0, 0, 0]):
        ws = trie.weight_max(np.array(odd, dtype=np.float64))
        assert "nan " not in re.sub(r'label="[^"]*"', "", drawn(trie, ws, 50))


def test_visualize_hands_the_source_to_graphviz_as_svg(monkeypatch) -> None:
    arguments = {}
    fake = types.ModuleType("graphviz")
    fake.Source = lambda source, **options: arguments.update(options, source=source) or "drawn"
    monkeypatch.setitem(sys.modules, "graphviz", fake)
    trie = trie_of(b"a")
    assert trie.visualize(trie.weight_sum([1.0])) == "drawn"
    assert arguments["format"] == "svg"
    assert arguments["source"].startswith("digraph")


def test_visualize_says_how_to_get_graphviz(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(MissingRequirementError, match=r"pip install genlm-core\[draw\]"):
        trie_of(b"a").visualize()


def test_weights_of_tokens_are_not_weights_of_nodes() -> None:
    with pytest.raises(WeightsError, match="one weight for each of the 4 nodes, as weight_sum"):
        trie_of(b"ab").visualize([1.0])
