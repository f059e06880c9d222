"""The generated pages of docs/plugins/ are up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from genlm import list_backends
from genlm.testing import all_checks

REPOSITORY = Path(__file__).parents[1]
PAGES = REPOSITORY / "docs" / "plugins"


@pytest.fixture(scope="module")
def script():
    path = REPOSITORY / "scripts" / "generate_plugin_docs.py"
    spec = importlib.util.spec_from_file_location("generate_plugin_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_checks_is_up_to_date(script) -> None:
    committed = (PAGES / "checks.md").read_text(encoding="utf-8")
    assert committed == script.checks_page(), "run python scripts/generate_plugin_docs.py"


def test_the_table_of_capabilities_has_every_certifiable_plugin() -> None:
    page = (PAGES / "capabilities.md").read_text(encoding="utf-8")
    for info in list_backends():
        if info.conformance is not None:
            assert f"`{info.name}`" in page, "run python scripts/generate_plugin_docs.py --run"


@pytest.mark.parametrize("kind", ["engine", "trie"])
def test_every_property_is_one_sentence_of_one_line(kind) -> None:
    for check in all_checks(kind):
        assert check.property.endswith("."), check.id
        assert len(check.property) < 100, check.id
