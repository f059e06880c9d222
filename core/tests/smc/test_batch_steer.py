"""`batch_steer` against `steer` for each prompt with the seed of its filter."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from scripted import ScriptedEngine

from genlm import Population
from genlm.constraints import Automaton, Constraint, Language, Python
from genlm.plugin import stream_seeds
from genlm.smc import batch_steer, batch_steer_sync, steer_sync

VOCABULARY = 4
END = 0
PROMPTS = [(2,), (3, 3, 2), (1,), (2,), (1, 3, 1, 2, 2)]
SIZE = 7
A, B, C = (bytes([byte]) for byte in (1, 2, 3))  # texts of the tokens


@pytest.fixture
def llm(make_model):
    return make_model(ScriptedEngine(VOCABULARY))


def potential(population: Any) -> Any:
    """Favours many threes; three ones in a row are impossible."""
    tokens = population.tokens
    ones = (tokens[:, :-2] == 1) & (tokens[:, 1:-1] == 1) & (tokens[:, 2:] == 1)
    return torch.where(ones.any(1), -math.inf, 0.9 * (tokens == 3).sum(1))


async def scored_potential(population: Any) -> Any:
    rows = await population.next_token_logprobs()
    return potential(population) + rows[:, 1]


def bias(population: Any) -> Any:
    """Depends on the last token of each member."""
    return torch.eye(VOCABULARY)[population.last_tokens] * 1.5


def check_equal(particles: Any, expected: Any) -> None:
    """Compare the particles of a filter of a batch with those of `steer`."""
    assert particles.population.tokens.tolist() == expected.population.tokens.tolist()
    assert particles.population.finished.tolist() == expected.population.finished.tolist()
    np.testing.assert_allclose(particles.log_weights, expected.log_weights, atol=1e-6)
    assert particles.log_evidence == pytest.approx(expected.log_evidence, abs=1e-6)
    assert particles.texts == expected.texts
    assert len(particles.history) == len(expected.history)
    for step, expected_step in zip(particles.history, expected.history, strict=True):
        assert step.is_resampled is expected_step.is_resampled
        for column, values in zip(step[:-1], expected_step[:-1], strict=True):
            np.testing.assert_allclose(column, values, atol=1e-6)


def check_batch(
    llm: Any, prompts: Any, *, each: Any = lambda _: {}, seed: int = 3, **options: Any
) -> Any:
    """Compare all steps of a batch with those of each filter; `each` has options of one."""
    batches = list(batch_steer_sync(llm, prompts, SIZE, seed=seed, **options))
    shared = {
        name: value for name, value in options.items() if name not in {"constraint", "text"}
    }
    seeds = stream_seeds(seed, len(prompts))
    filters = [
        list(steer_sync(llm, prompt, SIZE, seed=seed, **shared, **each(place)))
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    assert len(batches) == max(map(len, filters))
    for number, batch in enumerate(batches):
        assert len(batch) == len(prompts)
        for particles, states in zip(batch, filters, strict=True):
            check_equal(particles, states[min(number, len(states) - 1)])
    assert batches[-1].step_counts.tolist() == [len(states) for states in filters]
    return batches[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"stop": [END, 1]},
        {"potential": potential, "stop": [END]},
        {"potential": scored_potential, "bias": bias, "temperature": 1.4, "stop": [END]},
        {"potential": potential, "resample_below": 1, "stop": [B + B, A + A]},
        {"potential": potential, "potential_every": 3, "resample_below": 1, "stop": [END, 1]},
        {"resample_below": 0, "bias": [0.0, 1.0, 0.0, 0.5], "stop": ()},
    ],
    ids=["free", "potential", "bias", "texts", "every", "unweighted"],
)
def test_the_filters_of_a_batch_are_those_of_steer(llm, options):
    batch = check_batch(llm, PROMPTS, max_tokens=8, **options)
    if "resample_below" not in options and "potential" in options:
        resampled = [[step.is_resampled for step in each.history] for each in batch]
        assert len({tuple(flags) for flags in resampled}) > 1
    counts = batch.step_counts.tolist()
    assert (len(set(counts)) > 1) == (END in options["stop"])  # some end before the others


def test_a_filter_with_full_contexts_ends_before_the_others(make_model, caplog):
    llm = make_model(ScriptedEngine(VOCABULARY, max_context=7))
    batch = check_batch(
        llm, PROMPTS, max_tokens=6, potential=potential, resample_below=1, stop=[]
    )
    assert batch.step_counts.tolist() == [6, 5, 6, 6, 3]
    unfinished = [int((~each.population.finished).sum()) for each in (batch[1], batch[4])]
    assert min(unfinished) > 0
    assert f"{sum(unfinished)} of 35 continuations ended before max_tokens=6" in caplog.text


class Cooling:
    """A potential that changes at each step, also that of finished particles."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, population: Any) -> Any:
        self.calls += 1
        return potential(population) * (1 + self.calls)


def test_a_filter_that_has_ended_keeps_its_weights(llm):
    seeds = stream_seeds(3, len(PROMPTS))
    options: dict[str, Any] = {"max_tokens": 8, "stop": [END, 1]}
    *_, batch = batch_steer_sync(llm, PROMPTS, SIZE, potential=Cooling(), seed=3, **options)
    assert len(set(batch.step_counts.tolist())) > 1
    for particles, prompt, seed in zip(batch, PROMPTS, seeds, strict=True):
        *_, expected = steer_sync(llm, prompt, SIZE, potential=Cooling(), seed=seed, **options)
        check_equal(particles, expected)


def test_a_step_of_all_filters_is_one_draw(llm, monkeypatch):
    sizes = []

    async def draw(self, *arguments, **options):
        sizes.append(len(self))
        return await original(self, *arguments, **options)

    original = Population.draw
    monkeypatch.setattr(Population, "draw", draw)
    steps = len(list(batch_steer_sync(llm, PROMPTS, SIZE, max_tokens=5, stop=(), seed=0)))
    assert sizes == [len(PROMPTS) * SIZE] * steps


def test_changed_numbers_of_steps_do_not_change_the_filters(llm):
    lengths = []
    for batch in batch_steer_sync(llm, PROMPTS, SIZE, max_tokens=3, stop=(), seed=0):
        lengths.append(int(batch.population.lengths[0]))
        batch.step_counts[:] = 100
    assert lengths == [len(PROMPTS[0]) + step for step in (1, 2, 3)]


class NoTwo(Constraint):
    """A constraint of a user: token 2 is not allowed."""

    def __init__(self, count: int) -> None:
        self.finished = torch.zeros(count, dtype=torch.bool)
        self.log_potential = [0.0] * count

    def masks(self) -> Any:
        return [0, 1, 3], None

    def advance(self, token_ids: Any) -> NoTwo:
        assert len(token_ids) == len(self)
        return self

    def __getitem__(self, ancestors: Any) -> NoTwo:
        return NoTwo(len(np.arange(len(self))[ancestors]))


class Started(Language):
    """A language whose constraints a function creates."""

    def __init__(self, create: Any) -> None:
        self.create = create

    def start(self, llm: Any, size: int, **_: Any) -> Constraint:
        return self.create(size)


class OwnDraw(NoTwo):
    """A constraint with another proposal."""

    async def draw(self, population: Any, **options: Any) -> Any:
        return await population.draw([0, 1, 3], **options | {"bias": bias(population)})

    def __getitem__(self, ancestors: Any) -> OwnDraw:
        return OwnDraw(len(np.arange(len(self))[ancestors]))


def pattern(*parts: bytes) -> Automaton:
    """The texts that begin with bytes of each part, one byte after the other, and any after."""
    successors = np.full((len(parts) + 1, 256), -1)
    for state, part in enumerate(parts):
        successors[state, list(part)] = state + 1
    successors[-1, list(A + B + C)] = len(parts)
    return Automaton(successors, np.arange(len(parts) + 1) == len(parts))


LATER_PARTS = A + C, A + B + C, B + C
ALTERNATE, LATER = pattern(A + B, C, A + C), pattern(*LATER_PARTS)
FEW = Python(lambda text: text.count(C) < 3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "languages",
    [
        [ALTERNATE] * 5,
        [ALTERNATE, LATER, ALTERNATE, LATER, LATER],
        [Started(NoTwo), ALTERNATE, Started(NoTwo), LATER, ALTERNATE],
        [FEW, ALTERNATE, FEW, Started(OwnDraw), Started(NoTwo)],
    ],
    ids=["one", "two", "users", "proposals"],
)
def test_each_filter_has_its_language(llm, languages, temperature):
    options: dict[str, Any] = {"max_tokens": 6, "stop": [END], "temperature": temperature}
    batch = check_batch(
        llm,
        PROMPTS,
        constraint=languages,
        each=lambda place: {"constraint": languages[place]},
        **options,
        resample_below=0.9,
    )
    assert any(step.is_resampled for each in batch for step in each.history)
    if len(set(map(id, languages))) == 1:
        for particles in batch_steer_sync(
            llm, PROMPTS, SIZE, constraint=languages[0], seed=3, resample_below=0.9, **options
        ):
            last = particles
        assert last.population.tokens.tolist() == batch.population.tokens.tolist()


class Slow(NoTwo):
    """A constraint whose draws do not end, and that awaits something when it is cancelled."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.was_cancelled = False

    async def draw(self, population: Any, **options: Any) -> Any:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.01)
            self.was_cancelled = True


def test_languages_with_another_proposal_are_drawn_from_concurrently(llm):
    """In an event loop; a failure cancels the draws of the other languages."""
    languages = [FEW, ALTERNATE, FEW, Started(OwnDraw), FEW]
    options: dict[str, Any] = {"max_tokens": 4, "stop": [END], "constraint": languages}

    async def collected(**others: Any) -> Any:
        arguments = options | others
        return [batch async for batch in batch_steer(llm, PROMPTS, SIZE, seed=1, **arguments)]

    found = asyncio.run(collected())
    expected = list(batch_steer_sync(llm, PROMPTS, SIZE, seed=1, **options))
    for batch, other in zip(found, expected, strict=True):
        assert batch.population.tokens.tolist() == other.population.tokens.tolist()
        np.testing.assert_array_equal(batch.log_weights, other.log_weights)

    def fails(text: bytes) -> bool:
        raise LookupError(text)

    slow = Slow(SIZE)

    async def failed() -> bool:
        with pytest.raises(LookupError):
            await collected(
                constraint=[FEW, Python(fails), Started(lambda _: slow), *languages[3:]]
            )
        return slow.was_cancelled

    assert asyncio.run(failed())
    assert llm.statistics().pending == 0


def test_the_weights_of_a_shared_function_do_not_depend_on_other_filters(make_model):
    """The first round draws as many tokens as the other filters needed before."""
    llm = make_model(ScriptedEngine(64))
    few = Python(lambda text: sum(text) % 3 == 0)
    options: dict[str, Any] = {"max_tokens": 6, "stop": (), "constraint": few}
    for seed in range(4):
        *_, batch = batch_steer_sync(llm, PROMPTS, 1, seed=seed, **options)
        for particles, prompt, own in zip(batch, PROMPTS, stream_seeds(seed, 5), strict=True):
            *_, expected = steer_sync(llm, prompt, 1, seed=own, **options)
            check_equal(particles, expected)


class Broken(NoTwo):
    """A constraint with one defect."""

    def __init__(self, count: int, defect: str) -> None:
        super().__init__(count)
        self.defect = defect
        if defect == "log_potential":
            self.log_potential = [0.0] * (count + 1)
        if defect == "mask_index":
            self.masks = lambda: ([[0, 1, 3]], [0.0] * count)  # type: ignore[method-assign]

    def advance(self, token_ids: Any) -> Any:
        return NoTwo(len(token_ids) + 1) if self.defect == "advance" else self

    def __getitem__(self, ancestors: Any) -> Any:
        return ancestors


class BrokenDraw(NoTwo):
    """A constraint that draws a token too many."""

    async def draw(self, population: Any, **options: Any) -> Any:
        drawn = await population.draw(**options)
        return type(drawn)(*(torch.cat([column, column[:1]]) for column in drawn))


@pytest.mark.parametrize(
    ("create", "error", "message"),
    [
        ("advance", ValueError, "Broken, advance, has 8 members; expected 7"),
        ("indexing", TypeError, "Broken, indexing, is ndarray; expected a Constraint"),
        (
            "log_potential",
            ValueError,
            r"Broken.log_potential has shape \(8,\) and type float64; expected \(7,\)",
        ),
        ("mask_index", TypeError, "mask_index must be integers"),
        (BrokenDraw, ValueError, "BrokenDraw.draw returned 8 draws for 7 members"),
        (lambda size: NoTwo(size + 1), ValueError, "a constraint of 8 members for 7 particles"),
        (lambda _: 5, TypeError, "constraint=5; expected a Language or a Constraint"),
    ],
)
def test_a_defect_of_one_of_several_constraints_is_named(llm, create, error, message):
    options: dict[str, Any] = {"max_tokens": 4, "stop": [END], "resample_below": 1, "seed": 0}
    language = Started((lambda size: Broken(size, create)) if create in DEFECTS else create)
    other = Started(OwnDraw) if create is BrokenDraw else ALTERNATE
    with pytest.raises(error, match=message):
        list(batch_steer_sync(llm, PROMPTS[:2], SIZE, constraint=[other, language], **options))


DEFECTS = {"advance", "indexing", "log_potential", "mask_index"}


def test_one_number_is_the_potential_of_all_members_of_a_constraint(llm):
    class Constant(OwnDraw):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.log_potential = -1.5

    own = [{"constraint": Started(kind)} for kind in (Constant, OwnDraw)]
    check_batch(
        llm,
        PROMPTS[:2],
        constraint=[options["constraint"] for options in own],
        each=own.__getitem__,
        max_tokens=2,
        stop=[END],
    )


@pytest.mark.parametrize("languages", [LATER, [LATER, ALTERNATE, LATER, LATER, LATER]])
def test_each_filter_has_the_end_of_its_prompt(llm, languages):
    texts = [b"", A + B, A, b"", A]

    def own(place: int) -> dict[str, Any]:
        one = languages if isinstance(languages, Language) else languages[place]
        return {"constraint": one, "text": texts[place] if one is LATER else b""}

    if isinstance(languages, list):
        texts[1] = b""
    batch = check_batch(
        llm, PROMPTS, constraint=languages, text=texts, each=own, max_tokens=5, stop=[END]
    )
    for place, particles in enumerate(batch):
        if own(place)["constraint"] is LATER:
            parts = LATER_PARTS[len(texts[place]) :]
            for token_ids in particles.history.token_ids.tolist():
                for token_id, part in zip(token_ids, parts, strict=False):
                    assert token_id in part


def test_a_constraint_of_all_particles_and_a_bias_for_each(llm):
    constraint, count = OwnDraw(len(PROMPTS) * SIZE), len(PROMPTS) * SIZE
    own = {"constraint": OwnDraw(SIZE)}
    check_batch(
        llm, PROMPTS, constraint=constraint, each=lambda _: own, max_tokens=4, stop=[END]
    )
    biases = np.random.default_rng(0).normal(size=(count, VOCABULARY))
    languages = [FEW, ALTERNATE, FEW, LATER, Started(NoTwo)]
    for form in (biases, torch.from_numpy(biases[:, :1]), biases[:1], 0.5):
        *_, batch = batch_steer_sync(
            llm,
            PROMPTS,
            SIZE,
            constraint=languages,
            bias=form,
            max_tokens=1,
            stop=[END],
            seed=2,
        )
        for place, particles in enumerate(batch):
            part = slice(place * SIZE, (place + 1) * SIZE)
            *_, expected = steer_sync(
                llm,
                PROMPTS[place],
                SIZE,
                constraint=languages[place],
                bias=form[part] if np.shape(form)[:1] == (count,) else form,
                max_tokens=1,
                stop=[END],
                seed=stream_seeds(2, len(PROMPTS))[place],
            )
            check_equal(particles, expected)


def test_filters_continue_those_of_an_earlier_batch_with_their_weights(llm):
    """As `steer` continues a filter; the seed of each filter is given."""
    options: dict[str, Any] = {"max_tokens": 3, "stop": [3], "resample_below": 0.8}
    seeds = [5, 1, 5, 2**70, 0]
    *_, first = batch_steer_sync(llm, PROMPTS, SIZE, potential=potential, seed=seeds, **options)
    weights = torch.from_numpy(first.log_weights)
    options["stop"] = [END]
    *_, second = batch_steer_sync(
        llm, first.population.resume(), SIZE, log_weights=weights, seed=seeds, **options
    )
    for place, particles in enumerate(first):
        *_, expected = steer_sync(
            llm,
            first.population[place * SIZE : (place + 1) * SIZE].resume(),
            log_weights=particles.log_weights,
            seed=seeds[place],
            **options,
        )
        check_equal(second[place], expected)


def test_a_batch_is_a_sequence_of_particles(llm):
    *_, batch = batch_steer_sync(
        llm, PROMPTS, SIZE, max_tokens=6, potential=potential, stop=[END], seed=0
    )
    assert len(batch) == len(PROMPTS)
    assert batch.size == SIZE
    evidence = [particles.log_evidence for particles in batch]
    np.testing.assert_allclose(batch.log_evidence, evidence)
    for particles in (batch[-1], batch[3:][1]):
        check_equal(particles, batch[4])
    assert batch[4].population.tokens.tolist() == batch.population[-SIZE:].tokens.tolist()
    with pytest.raises(IndexError):
        batch[5]
    finished = int(np.sum([each.population.finished.all() for each in batch]))
    expected = f"5 filters of {SIZE} particles after {len(batch.steps)} steps, {finished} fin"
    assert expected in repr(batch)


def test_a_table_has_a_row_for_each_particle_of_each_filter(llm):
    pytest.importorskip("pandas")
    *_, batch = batch_steer_sync(llm, PROMPTS, SIZE, max_tokens=3, stop=(), seed=0)
    table = batch.to_pandas()
    assert table.index.names == ["filter", "particle"]
    assert table.loc[2]["text"].tolist() == batch[2].texts
    assert len(table) == len(PROMPTS) * SIZE


def test_a_filter_without_room_makes_no_step(make_model):
    llm = make_model(ScriptedEngine(VOCABULARY, max_context=3))
    full = llm.context([1, 1, 1]).extend(2)
    *_, batch = batch_steer_sync(llm, [full, (1,)], 2, max_tokens=2, stop=(), seed=0)
    assert batch.step_counts.tolist() == [0, 2]
    particles = batch[0]
    assert particles.texts == ["", ""]
    assert particles.text_weights == {"": 1.0}
    assert particles.token_ids.tolist() == [-1, -1]
    assert particles.ancestors.tolist() == [0, 1]
    assert particles.history.ancestry.shape == (0, 2)
    assert "2 particles after 0 steps" in str(particles)


def test_no_prompts_are_no_filters(llm):
    for options in ({}, {"constraint": LATER}, {"constraint": []}):
        assert list(batch_steer_sync(llm, [], 3, max_tokens=5, **options)) == []
    assert list(batch_steer_sync(llm, llm.population([]), 3, max_tokens=5)) == []
    assert list(batch_steer_sync(llm, PROMPTS, 3, max_tokens=0)) == []


def test_the_blocking_form_has_the_signature_of_batch_steer():
    assert inspect.signature(batch_steer_sync) == inspect.signature(batch_steer)
    assert "The blocking form of `batch_steer`" in batch_steer_sync.__doc__


def test_arguments_that_batch_steer_cannot_use_are_refused(llm, make_model):
    population = llm.population(PROMPTS)
    *_, batch = batch_steer_sync(llm, PROMPTS, SIZE, max_tokens=1)
    other = make_model(ScriptedEngine(VOCABULARY)).population(PROMPTS)
    refused: dict[str, Any] = {
        "size=0": (ValueError, {"size": 0}),
        r"pass \[ids\], or call `steer` for one prompt": (TypeError, {"prompts": [1, 2]}),
        "size=None; expected an integer": (TypeError, {"size": None}),
        "5 members for filters of 2 particles": (ValueError, {"prompts": population}),
        "belongs to a different model": (ValueError, {"prompts": other, "size": 1}),
        "prompt is ParticlesBatch; to continue a filter": (TypeError, {"prompts": batch}),
        "prompt is Particles; to continue a filter": (TypeError, {"prompts": batch[0]}),
        "2 seeds for 5 filters": (ValueError, {"seed": [1, 2]}),
        "seed=-1": (ValueError, {"seed": [0, 0, 0, 0, -1]}),
        "seed=1.5": (TypeError, {"seed": 1.5}),
        "constraint has length 1 for 5": (ValueError, {"constraint": [LATER]}),
        "constraint='a'; expected a Language": (TypeError, {"constraint": ["a"] * 5}),
        "constraint=7; expected a Language": (TypeError, {"constraint": 7}),
        "constraint=None; expected a Language": (
            TypeError,
            {"constraint": deque([LATER, None, LATER, None, None])},
        ),
        "text has length 1 for 5": (ValueError, {"constraint": LATER, "text": [b""]}),
        "text='a'; texts of languages are bytes": (
            TypeError,
            {"constraint": LATER, "text": "a"},
        ),
        "text=None; texts of languages are bytes": (
            TypeError,
            {"constraint": LATER, "text": None},
        ),
        "text belongs to the texts of a Language": (ValueError, {"text": [b""] * 5}),
        "a constraint of 3 members for 10 particles": (ValueError, {"constraint": NoTwo(3)}),
        r"log_weights has shape \(10,\); expected \(5, 2\)": (
            ValueError,
            {"log_weights": [0.0] * 10},
        ),
        "end with token ids": (TypeError, {"constraint": [LATER] * 5, "stop": ["."]}),
        "expected one number for each of 10 particles": (
            ValueError,
            {"potential": lambda _: [0.0] * 2},
        ),
    }
    for message, (error, options) in refused.items():
        arguments = {"prompts": PROMPTS, "size": 2, "max_tokens": 1, "stop": [END], **options}
        with pytest.raises(error, match=message):
            next(batch_steer_sync(llm, **arguments))
