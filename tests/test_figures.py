"""The pictures of docs/figures.md show what the stored results give."""

from __future__ import annotations

import importlib.util
import re

import pytest
from documents import REPOSITORY


def load(name):
    path = REPOSITORY / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script, animation = load("plot_figures"), load("particle_animation")


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


def test_the_genealogy_is_of_a_run_of_the_program():
    picture = script.PICTURES / f"{script.GENEALOGY}.svg"
    [[shown]] = [lines.values() for lines in script.shown_in(picture).values()]
    sizes = [step.effective_sample_size for step in script.json_particles()]
    assert [*shown.values()] == pytest.approx(sizes, abs=0.02), "run scripts/plot_figures.py"
    page = (REPOSITORY / "docs" / "programs" / "awrs_json.md").read_text("utf-8")
    assert f"](../assets/{script.GENEALOGY}.svg)" in page


def test_the_animation_of_the_readme_shows_what_the_filter_finds():
    shown, found = animation.shown_in(animation.PICTURE), animation.record()
    for one, another in zip(shown, found, strict=True):
        weights = another.pop("weights")
        assert one.pop("weights") == pytest.approx(weights, abs=0.002)
        assert one == another, "run python scripts/particle_animation.py"
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert "](docs/assets/particles.svg)" in readme


def test_each_frame_of_the_animation_has_its_texts_and_time():
    frames = animation.shown_in(animation.PICTURE)
    text = animation.PICTURE.read_text("utf-8")
    assert text == animation.drawn(frames)
    groups = re.findall(r'<g class="frame" id="(f\d+)">(.*?)</g>', text, re.DOTALL)
    assert [name for name, _ in groups] == [f"f{i}" for i in range(len(frames))]
    for (_, group), frame in zip(groups, frames, strict=True):
        assert group.count("<rect") == len(frame["texts"])
        resampled = frame["ancestors"] != list(range(len(frame["texts"])))
        assert ("<path" in group) == resampled
    assert any("<path" in group for _, group in groups)
