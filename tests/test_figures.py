"""The pictures of docs/figures.md show what the stored results give."""

from __future__ import annotations

import importlib.util
import re

import pytest
from documents import REPOSITORY

path = REPOSITORY / "scripts" / "plot_figures.py"
spec = importlib.util.spec_from_file_location("plot_figures", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.mark.parametrize("name", script.FIGURES)
def test_a_picture_shows_the_stored_results(name):
    picture = script.PICTURES / f"{name}.svg"
    numbers = script.FIGURES[name][0]()
    assert script.shown_in(picture) == numbers, "run python scripts/plot_figures.py"
    text = picture.read_text("utf-8")
    for title, lines in numbers.items():
        assert title in text
        for label in lines:
            assert label in text


@pytest.mark.parametrize("name", script.FIGURES)
def test_a_picture_is_shown_and_has_no_background(name):
    page = (REPOSITORY / "docs" / "figures.md").read_text("utf-8")
    assert f"](assets/{name}.svg)" in page
    text = (script.PICTURES / f"{name}.svg").read_text("utf-8")
    [patch] = re.findall(r'<g id="patch_1">(.*?)</g>', text, re.DOTALL)
    assert "fill: none" in patch


def test_the_picture_of_the_readme_shows_what_the_demo_finds():
    picture = script.PICTURES / "demo.svg"
    [[shown]] = [lines.values() for lines in script.shown_in(picture).values()]
    [[found]] = [lines.values() for lines in script.demo().values()]
    assert list(shown) == list(found), "run python scripts/plot_figures.py"
    assert shown == pytest.approx(found, abs=0.002)
    assert "](docs/assets/demo.svg)" in (REPOSITORY / "README.md").read_text("utf-8")
