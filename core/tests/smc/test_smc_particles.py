"""`Particles` and `History`: what is shown of a filter."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from constrained_model import END, SmallEngine, text_of

import genlm
from genlm.constraints import Automaton
from genlm.smc import History, Step, effective_sample_size, steer_sync

PROMPT = (2, 3)
SIZE = 12


@pytest.fixture(scope="module")
def llm():
    with genlm.AsyncLM(SmallEngine) as model:
        yield model


@pytest.fixture(scope="module")
def states(llm) -> list[Any]:
    rule = Automaton.regex("[abé]{2,6}")
    options = {"max_tokens": 8, "constraint": rule, "resample_below": 0.9, "seed": 3}
    steps = [*steer_sync(llm, PROMPT, SIZE, **options)]
    assert len(steps) > 3
    assert any(step.is_resampled for step in steps[-1].history)
    return steps


def test_the_ancestry_leads_back_to_the_tokens_of_each_particle(states):
    last = states[-1]
    ancestry = last.history.ancestry
    assert ancestry.shape == (len(states), SIZE)
    assert ancestry[-1].tolist() == list(range(SIZE))
    for member, context in enumerate(last.population):
        ids, place = [], member
        for step in reversed(last.history):
            ids.append(int(step.token_ids[step.ancestors[place]]))
            place = step.ancestors[place]
        assert (
            tuple(token_ids for token_ids in ids[::-1] if token_ids >= 0)
            == context.token_ids[2:]
        )
        for number, state in enumerate(states):
            part = state.population[int(ancestry[number, member])].token_ids
            assert context.token_ids[: len(part)] == part
    assert History().ancestry.shape == History().token_ids.shape == (0, 0)


def test_the_history_keeps_no_memory_of_tensors(states):
    assert all(step.token_ids.base.flags.owndata for step in states[-1].history)


def test_changed_log_weights_change_neither_the_history_nor_the_filter(llm):
    options: dict[str, Any] = {"max_tokens": 8, "resample_below": 0.5, "seed": 3}
    rule = Automaton.regex("[abé]{2,6}")
    changed: Any = None
    for changed in steer_sync(llm, PROMPT, SIZE, constraint=rule, **options):
        changed.log_weights[:] = 7.0
    *_, kept = steer_sync(llm, PROMPT, SIZE, constraint=rule, **options)
    assert not all(step.is_resampled for step in kept.history)
    for step, expected in zip(changed.history, kept.history, strict=True):
        assert step.log_weights.tolist() == expected.log_weights.tolist()
        assert step.ancestors.tolist() == expected.ancestors.tolist()
    for changed in steer_sync(llm, PROMPT, SIZE, constraint=rule, **options):
        changed.history[-1].log_weights[:] = 7.0
    assert changed.log_weights.tolist() == kept.log_weights.tolist()
    assert changed.population.tokens.tolist() == kept.population.tokens.tolist()


def test_particles_are_compared_by_identity(states):
    assert states[0] != states[1]
    assert len({*states, states[0]}) == len(states)


def test_the_history_has_the_figures_of_all_steps(states):
    last = states[-1].history
    assert len(last) == len(states)
    assert len(last[1:]) == len(states) - 1
    for step, state in zip(last, states, strict=True):
        assert step.log_evidence == pytest.approx(state.log_evidence)
        expected = effective_sample_size(step.log_weights)
        assert step.effective_sample_size == pytest.approx(expected)
        if step.is_resampled:
            assert state.effective_sample_size == pytest.approx(SIZE)
        for column, expected in zip(step, state.history[-1], strict=True):
            assert np.array_equal(column, expected)
    dead = Step(np.full(2, -1), np.full(2, -np.inf), np.ones(2, bool), np.arange(2))
    assert dead.effective_sample_size == 0
    assert dead.log_evidence == -np.inf
    equal = Step(np.zeros(10), np.zeros(10), np.zeros(10, bool), np.arange(10))
    assert equal.log_evidence == 0


def test_texts_are_those_after_the_prompt(states):
    last = states[-1]
    assert len(last) == SIZE
    for text, context in zip(last.texts, last.population, strict=True):
        assert text == text_of(context.token_ids[2:]).decode()


def test_weights_of_equal_texts_are_added(states):
    particles = next(state for state in states if len(set(state.texts)) < SIZE)
    weights = particles.text_weights
    assert list(weights.values()) == sorted(weights.values(), reverse=True)
    assert set(weights) == set(particles.texts)
    for text, weight in weights.items():
        places = [place for place, other in enumerate(particles.texts) if other == text]
        assert weight == pytest.approx(particles.weights[places].sum())


def test_tables_have_a_row_for_each_particle_and_each_step(states):
    pytest.importorskip("pandas")
    last = states[-1]
    table = last.to_pandas()
    assert table["text"].tolist() == last.texts
    np.testing.assert_allclose(table["weight"], last.weights)
    np.testing.assert_allclose(table["log_weight"], last.log_weights)
    assert table["ancestor"].tolist() == last.ancestors.tolist()
    assert table["finished"].tolist() == last.population.finished.tolist()
    lengths = [len(context.token_ids) - 2 for context in last.population]
    assert table["tokens"].tolist() == lengths
    steps = last.history.to_pandas()
    assert steps.index.tolist() == list(range(1, len(states) + 1))
    assert steps["log_evidence"].iloc[-1] == pytest.approx(last.log_evidence)
    assert steps["alive"].max() == SIZE
    ended = [context.token_ids[-1] == END for context in last.population]
    assert steps["finished"].iloc[-1] == sum(ended)


def test_what_is_printed_fits_a_screen(states, llm):
    title, head, *lines = str(states[-1]).splitlines()
    assert title.startswith(f"{SIZE} particles after {len(states)} steps, ")
    assert head.split() == ["weight", "particles", "text"]
    assert sum(float(line.split()[0]) for line in lines[:10]) <= 1.001
    assert len(repr(states[-1].history).splitlines()) == 1 + len(states)
    assert "resampled" in repr(states[-1].history)
    many = [*steer_sync(llm, PROMPT, 200, max_tokens=4, seed=0)][-1]
    assert len(str(many).splitlines()) == 13
    assert str(many).splitlines()[-1].endswith(" more texts")
    [dead] = steer_sync(llm, PROMPT, 3, max_tokens=4, potential=lambda _: [-np.inf] * 3)
    assert "0 finished, 3 dead: log-evidence -inf, effective sample size 0.0" in str(dead)
    assert dead.weights.tolist() == dead.to_pandas()["weight"].tolist() == [0, 0, 0]
    assert [*dead.history[:0].to_pandas()] == [*dead.history.to_pandas()]


def test_the_representation_decodes_no_text(states, monkeypatch):
    """Python 3.11's `asyncio.run` formats the result of its coroutine."""
    table, shown = str(states[-1]), []
    states[-1]._repr_pretty_(SimpleNamespace(text=shown.append), False)  # of notebooks
    assert shown == [table]
    monkeypatch.setattr(type(states[-1].llm), "decode", None)
    assert repr(states[-1]) == f"<Particles: {table.splitlines()[0]}>"


def test_a_picture_has_the_genealogy_and_the_effective_sample_sizes(states, tmp_path):
    pytest.importorskip("matplotlib")
    last = states[-1]
    figure = last.plot()
    above, below = figure.axes
    lost, surviving = above.collections[:2]
    edges = (len(states) - 1) * SIZE
    assert len(lost.get_segments()) + len(surviving.get_segments()) == edges
    ancestry = last.history.ancestry
    expected = sum(len(np.unique(row)) for row in ancestry[1:])
    assert len(surviving.get_segments()) == expected
    [line] = below.lines
    sizes = [step.effective_sample_size for step in last.history]
    np.testing.assert_allclose(line.get_ydata(), sizes)
    figure.savefig(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert len(History().plot().axes) == 2


@pytest.mark.parametrize("library", ["pandas", "matplotlib"])
def test_a_missing_library_is_named(states, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    call = states[-1].to_pandas if library == "pandas" else states[-1].plot
    with pytest.raises(genlm.MissingRequirementError, match=f"pip install {library}"):
        call()


def test_a_bar_shows_the_steps_if_asked(llm, capsys):
    *_, last = steer_sync(llm, PROMPT, 5, max_tokens=3, seed=0, progress=True)
    output = capsys.readouterr().err
    assert "steer" in output
    assert "effective" in output
    *_, last = steer_sync(llm, PROMPT, 5, max_tokens=3, seed=0)
    assert capsys.readouterr().err == ""
    assert len(last) == 5


def test_a_constraint_of_another_size_is_refused(llm):
    constraint = Automaton.regex("a").start(llm, 4)
    with pytest.raises(ValueError, match="a constraint of 4 members for 5 particles"):
        next(steer_sync(llm, PROMPT, 5, max_tokens=3, constraint=constraint))
