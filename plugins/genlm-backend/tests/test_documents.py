"""What the README and the page on migrating show runs, and what they point at exists."""

from __future__ import annotations

import re

import pytest
import torch
from documents import REPOSITORY, blocks

import genlm
import genlm.backend.llm

README, MIGRATING = "plugins/genlm-backend/README.md", "docs/migrating.md"

HOST = "https://github.com/genlm/genlm/blob/main/"


def test_the_readme_runs():
    [block] = blocks(README)
    names = {}
    exec(block, names)
    with names["llm"] as llm:
        assert names["rows"].shape == (2, len(llm.byte_vocab))
        torch.testing.assert_close(names["rows"].logsumexp(1), torch.zeros(2))


def test_before_and_after_migrating_give_the_same_rows(folder):
    [block] = blocks(MIGRATING)
    rows = []
    for part in block.split("# after"):
        names = {}
        exec(part.replace("org/model", str(folder)), names)
        with names["llm"] as llm:
            assert isinstance(llm, genlm.AsyncLM)
            rows.append(llm.batch_next_token_logprobs_sync([[3, 4, 5], [6]]))
    before, after = rows
    assert torch.equal(before, after)


@pytest.mark.parametrize("document", [README, MIGRATING], ids=["readme", "migrating"])
def test_links_and_folders_exist(document):
    page = REPOSITORY / document
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    files = [REPOSITORY / link.removeprefix(HOST) for link in links if link.startswith(HOST)]
    files += [page.parent / link for link in links if "://" not in link]
    assert files
    for file in files:
        assert file.exists(), file
    for folder in re.findall(r"(?<!\.)\./((?:core|plugins)[\w/-]*)", text):
        assert (REPOSITORY / folder / "pyproject.toml").exists(), folder


def test_every_name_of_the_table_exists():
    text = (REPOSITORY / MIGRATING).read_text()
    table = text[text.index("### Names\n") : text.index("### Speed\n")]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    published = [name for row in rows for name in re.findall(r"`(\w+)", row[0])]
    places = (genlm.backend, genlm.backend.llm, genlm.backend.AsyncTransformer)
    options = {"batch_size", "timeout", "cache_size", "cache_opts"}
    assert len(published) > 20
    for name in set(published) - options:
        assert any(hasattr(place, name) for place in places), name
