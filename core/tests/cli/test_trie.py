"""`genlm trie`: what it prints and what it refuses."""

from __future__ import annotations

import shutil

from typer.testing import CliRunner

from genlm.cli import app
from genlm.core.errors import MissingRequirementError, WeightsError

run = CliRunner().invoke


def test_texts_are_printed_as_a_tree() -> None:
    done = run(app, ["trie", "the", "to", "-w", "0.25", "-w", "0.75"])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "root  1",
        "└─ t  1",
        "   ├─ he  0.25",
        "   │  └─ end 0  0.25",
        "   └─ o  0.75",
        "      └─ end 1  0.75",
    ]


def test_dot_prints_graphviz_source() -> None:
    done = run(app, ["trie", "--dot", "é", "é"])
    assert done.output.startswith("digraph trie {")
    assert 'label="é\\n2"' in done.output
    assert 'label="\\\\xc3"' in done.output
    assert done.output.count("peripheries=2") == 2


def test_large_tries_are_folded() -> None:
    done = run(app, ["trie", "--max-nodes", "2", "ab", "cd"])
    assert done.output.splitlines() == [
        "root  2",
        "├─ a  1",
        "│  └─ … 1 more token",
        "└─ … 1 more token",
    ]


def test_a_weight_is_needed_for_every_text_or_none() -> None:
    done = run(app, ["trie", "a", "b", "-w", "1"])
    assert isinstance(done.exception, WeightsError)


def test_svg_says_what_is_missing(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = run(app, ["trie", "a", "--svg", str(tmp_path / "a.svg")])
    assert isinstance(done.exception, MissingRequirementError)
    assert "dot" in str(done.exception)


def test_svg_writes_what_graphviz_draws(monkeypatch, tmp_path) -> None:
    from genlm import TokenCharacterTrie

    class Drawn:
        def pipe(self) -> bytes:
            return b"<svg/>"

    monkeypatch.setattr(shutil, "which", lambda name: "/bin/dot")
    monkeypatch.setattr(TokenCharacterTrie, "visualize", lambda *_, **__: Drawn())
    done = run(app, ["trie", "a", "--svg", str(tmp_path / "a.svg")])
    assert done.exit_code == 0
    assert (tmp_path / "a.svg").read_bytes() == b"<svg/>"
    assert done.output == f"wrote {tmp_path / 'a.svg'}\n"


def test_an_image_needs_a_folder_and_excludes_dot(tmp_path) -> None:
    done = run(app, ["trie", "a", "--svg", str(tmp_path / "none" / "a.svg")])
    assert done.exit_code == 2
    assert "folder not found" in done.output
    done = run(app, ["trie", "a", "--dot", "--svg", str(tmp_path / "a.svg")])
    assert done.exit_code == 2
    assert "exclude each other" in done.output
