"""`genlm.smc` against closed forms and against counts over all random numbers."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedEngine, oracle_row

from genlm.constraints import Automaton, Constraint, Language
from genlm.smc import (
    batch_resampled,
    effective_sample_size,
    normalised_weights,
    resampled,
    steer,
    steer_sync,
    systematic_resampling,
)

LOG_WEIGHTS = st.lists(st.floats(-30, 30) | st.just(-math.inf), min_size=1, max_size=30).filter(
    lambda log_weights: max(log_weights) > -math.inf
)
UNIFORMS = st.floats(0, 1, exclude_max=True)
LARGEST = math.nextafter(1, 0)


def exact_weights(log_weights: list[float]) -> list[float]:
    largest = max(log_weights)
    weights = [math.exp(log_weight - largest) for log_weight in log_weights]
    return [weight / math.fsum(weights) for weight in weights]


@given(LOG_WEIGHTS, st.floats(-1e4, 1e4))
def test_weights_are_those_of_exp_and_do_not_depend_on_a_common_constant(log_weights, shift):
    expected = exact_weights(log_weights)
    shifted = [log_weight + shift for log_weight in log_weights]
    np.testing.assert_allclose(normalised_weights(log_weights), expected, atol=1e-14)
    np.testing.assert_allclose(normalised_weights(shifted), expected, atol=1e-9)


@given(LOG_WEIGHTS)
def test_the_effective_sample_size_is_kishs(log_weights):
    expected = 1 / math.fsum(weight**2 for weight in exact_weights(log_weights))
    assert effective_sample_size(log_weights) == pytest.approx(expected)
    assert 1 - 1e-9 <= expected <= len(log_weights) + 1e-9


@pytest.mark.parametrize("count", [1, 2, 10, 1000])
def test_equal_weights_are_exactly_as_many_as_there_are(count):
    assert effective_sample_size([-700.0] * count) == count
    assert resampled([-700.0] * count, 0.0, 1.0)[0].tolist() == [*range(count)]
    assert effective_sample_size([0.0] + [-math.inf] * count) == 1


@given(LOG_WEIGHTS, UNIFORMS | st.just(0.0) | st.just(LARGEST), st.integers(0, 60))
def test_each_particle_is_chosen_its_share_of_times_rounded_up_or_down(
    log_weights, uniform, size
):
    ancestors = systematic_resampling(log_weights, uniform, size)
    assert ancestors.shape == (size,)
    assert (np.diff(ancestors) >= 0).all()
    counts = np.bincount(ancestors, minlength=len(log_weights))
    for weight, count in zip(exact_weights(log_weights), counts, strict=True):
        assert size * weight - 1 - 1e-9 < count < size * weight + 1 + 1e-9
        assert weight > 0 or count == 0


@given(LOG_WEIGHTS)
def test_each_particle_is_chosen_its_share_of_times_on_average(log_weights):
    """Over a grid of uniforms; each count changes at two of the grid's points at most."""
    size, grid = len(log_weights), 200
    counts = np.zeros(size)
    for index in range(grid):
        ancestors = systematic_resampling(log_weights, (index + 0.5) / grid)
        counts += np.bincount(ancestors, minlength=size)
    expected = size * np.array(exact_weights(log_weights))
    assert (np.abs(counts / grid - expected) <= 2 / grid + 1e-9).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_particle_without_weight_is_never_chosen(uniform):
    log_weights = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert set(systematic_resampling(log_weights, uniform, 100_001)) == {1, 3}


def test_arrays_give_arrays_and_tensors_give_tensors_of_their_dtype():
    array = np.log(np.array([1, 3], dtype=np.float32))
    tensor = torch.from_numpy(array)
    assert normalised_weights(array).dtype == np.float64
    assert normalised_weights(tensor).dtype == torch.float32
    torch.testing.assert_close(normalised_weights(tensor), torch.tensor([0.25, 0.75]))
    assert normalised_weights(torch.tensor([0, 0])).tolist() == [0.5, 0.5]
    assert systematic_resampling(array, 0.5).dtype == np.int64
    ancestors = systematic_resampling(tensor, 0.1, size=4)
    assert ancestors.dtype == torch.int64
    assert ancestors.tolist() == [0, 1, 1, 1]
    for below in (0.5, 1):  # kept and resampled
        of_array, of_tensor = (resampled(values, 0.9, below) for values in (array, tensor))
        assert [type(column) for column in of_array] == [np.ndarray] * 2
        assert [column.dtype for column in of_array] == [np.int64, np.float64]
        assert [column.dtype for column in of_tensor] == [torch.int64, torch.float32]
        for ours, expected in zip(of_tensor, of_array, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-6)
        of_tensor[1].zero_()
        assert tensor.tolist() == np.log(np.array([1, 3], np.float32)).tolist()  # unchanged


def test_tensors_with_gradients_and_of_half_precision_are_read():
    tensor = torch.zeros(3, requires_grad=True)
    assert not normalised_weights(tensor).requires_grad
    assert effective_sample_size(tensor.to(torch.bfloat16)) == pytest.approx(3)


def test_what_is_given_is_not_changed():
    array = np.array([0.0, 1.0])
    normalised_weights(array)[0] = 7
    systematic_resampling(array, 0.5)
    assert array.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "shape"),
        ([[0.0, 1.0]], "shape"),
        ([0.0, math.nan], "maximum of nan"),
        ([0.0, math.inf], "maximum of inf"),
        ([-math.inf, -math.inf], "no particle survived: all 2 log-weights are -inf"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        effective_sample_size,
        normalised_weights,
        lambda log_weights: systematic_resampling(log_weights, 0.5),
    ],
    ids=["size", "weights", "resampling"],
)
def test_what_is_no_log_weights_is_refused(wrong, message, function):
    for given_as in (wrong, np.array(wrong), torch.tensor(wrong)):
        with pytest.raises(ValueError, match=message):
            function(given_as)


@pytest.mark.parametrize("uniform", [-0.1, 1.0, math.nan])
def test_a_number_that_is_no_uniform_is_refused(uniform):
    with pytest.raises(ValueError, match=r"uniform=.*(from 0 to below 1|not negative)"):
        systematic_resampling([0.0], uniform)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="size=-1"):
        systematic_resampling([0.0], 0.5, -1)


@pytest.mark.parametrize("below", [-0.1, 1.5, math.nan, math.inf])
def test_a_threshold_that_is_no_share_is_refused(below):
    with pytest.raises(ValueError, match="below="):
        resampled([0.0, -50.0], 0.5, below)


@pytest.mark.parametrize("wrong", [None, "0.5", 1j, [0.5], np.zeros(2), torch.zeros(2), ...])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(TypeError, match=r"uniform=.*expected a number"):
        systematic_resampling([0.0], wrong)
    with pytest.raises(TypeError, match=r"below=.*expected a number"):
        resampled([0.0, -50.0], 0.5, wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match=r"size=.*expected an integer"):
            systematic_resampling([0.0], 0.5, wrong)


@pytest.mark.parametrize(
    "wrong",
    ["0", ["0"], [True], [1j], {}, torch.zeros(1, device="meta"), torch.ones(1).to_sparse()],
)
@pytest.mark.parametrize("function", [effective_sample_size, normalised_weights])
def test_log_weights_that_are_no_numbers_are_refused(wrong, function):
    with pytest.raises(TypeError, match="log_weights"):
        function(wrong)


def test_a_single_number_is_no_log_weights():
    with pytest.raises(ValueError, match=r"shape \(particles,\); found \(\)"):
        resampled(0.0, 0.5)


@given(st.data())
def test_filters_are_resampled_independently(data):
    size, count = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5))
    log_weight = st.floats(-30, 30) | st.just(-math.inf)
    filters = data.draw(
        st.lists(
            st.lists(log_weight, min_size=size, max_size=size), min_size=count, max_size=count
        )
    )
    uniforms = np.array(data.draw(st.lists(UNIFORMS, min_size=count, max_size=count)))
    below = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    log_weights = np.array(filters).reshape(count, size)
    ancestors, new = batch_resampled(log_weights, uniforms, below)
    assert ancestors.shape == (count * size,)
    for index, logs in enumerate(filters):
        expected = np.arange(size), np.array(logs)
        if max(logs) > -math.inf:  # otherwise no particle can be chosen
            expected = resampled(logs, uniforms[index], below)
        members = ancestors[index * size : (index + 1) * size] - index * size
        assert members.tolist() == expected[0].tolist()
        np.testing.assert_array_equal(new[index], expected[1])
    of_tensor = batch_resampled(torch.from_numpy(log_weights).float(), uniforms, below)
    assert of_tensor[0].tolist() == ancestors.tolist()
    assert of_tensor[1].dtype == torch.float32


@pytest.mark.parametrize(
    ("log_weights", "uniforms", "message"),
    [
        (np.zeros(2), [0.5], r"shape \(filters, particles\); found \(2,\)"),
        (np.zeros((2, 0)), [0.5, 0.5], r"shape \(filters, particles\); found \(2, 0\)"),
        (np.zeros((2, 3)), [0.5], r"uniforms of shape \(1,\) for 2 filters"),
        (np.zeros((2, 3)), 0.5, r"uniforms of shape \(\) for 2 filters"),
        (np.zeros((2, 3)), [0.5, 1.0], "uniform=1.0"),
        (np.array([[0.0, math.nan]]), [0.5], "NaN or inf"),
        (np.array([[0.0, math.inf]]), [0.5], "NaN or inf"),
    ],
)
def test_wrong_arguments_of_several_filters_are_refused(log_weights, uniforms, message):
    with pytest.raises(ValueError, match=message):
        batch_resampled(log_weights, uniforms)


# -- steer ----------------------------------------------------------------------------

VOCABULARY = 4
STEPS = 3
END = 0
PROMPT = (2,)


def probability(token_ids: tuple[int, ...], prompt: tuple[int, ...] = PROMPT) -> float:
    """Of a continuation of a prompt, in float64."""
    product = 1.0
    for place in range(len(prompt), len(token_ids)):
        row = oracle_row(token_ids[:place], None, VOCABULARY).double()
        product *= math.exp(row[token_ids[place]])
    return product


def continuations(prompt: tuple[int, ...] = PROMPT) -> list[tuple[int, ...]]:
    """Every continuation that ends with the stop token, or after all steps."""
    sequences = []
    for length in range(1, STEPS + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            ended = tokens[-1] == END or length == STEPS
            if END not in tokens[:-1] and ended:
                sequences.append((*prompt, *tokens))
    return sequences


def potential_of(token_ids: tuple[int, ...]) -> float:
    """Favours many threes; two ones are impossible."""
    return -math.inf if token_ids.count(1) > 1 else 0.7 * token_ids.count(3)


def potential(population: Any) -> list[float]:
    return [potential_of(context.token_ids) for context in population]


class NoTwo(Constraint):
    """Token 2 is not allowed; which mask a member has alternates between equal ones."""

    def __init__(self, mask_index: np.ndarray) -> None:
        self.mask_index = mask_index
        self.finished = np.zeros(len(mask_index), bool)
        self.log_potential = np.zeros(len(mask_index))

    def masks(self) -> Any:
        return ([0, 1, 3], [0, 1, 3]), self.mask_index

    def advance(self, token_ids: Any) -> NoTwo:
        assert token_ids.shape == self.mask_index.shape
        return NoTwo(1 - self.mask_index)

    def __getitem__(self, ancestors: Any) -> NoTwo:
        return NoTwo(self.mask_index[ancestors])


@pytest.fixture
def llm(make_model):
    return make_model(ScriptedEngine(VOCABULARY))


def last(llm: Any, size: int, **options: Any) -> Any:
    options = {"max_tokens": STEPS, "stop": [END]} | options
    *_, particles = steer_sync(llm, PROMPT, size, **options)
    return particles


class ManyThrees(Constraint):
    """The potential of `potential_of`, as a constraint that allows all tokens."""

    def __init__(self, texts: list[tuple[int, ...]]) -> None:
        self.texts = texts
        self.finished = np.zeros(len(texts), bool)
        self.log_potential = np.array([potential_of(text) for text in texts])

    def masks(self) -> Any:
        return list(range(VOCABULARY)), None

    def advance(self, token_ids: Any) -> ManyThrees:
        pairs = zip(self.texts, token_ids.tolist(), strict=True)
        return type(self)([(*text, token) if token >= 0 else text for text, token in pairs])

    def __getitem__(self, ancestors: Any) -> ManyThrees:
        return type(self)([self.texts[ancestor] for ancestor in ancestors])


def test_log_potentials_of_a_constraint_weigh_as_a_potential_does(llm):
    for seed, below in itertools.product(range(5), (0.5, 1)):
        options = {"seed": seed, "resample_below": below}
        particles = last(llm, 30, potential=potential, **options)
        other = last(llm, 30, constraint=ManyThrees([PROMPT] * 30), **options)
        assert particles.population.tokens.tolist() == other.population.tokens.tolist()
        np.testing.assert_allclose(particles.log_weights, other.log_weights, atol=1e-5)


class Broken(NoTwo):
    """A constraint with one defect."""

    def __init__(self, size: int, **defect: Any) -> None:
        super().__init__(np.zeros(size, np.int64))
        self.defect = defect
        for name in defect.keys() & {"finished", "log_potential"}:
            setattr(self, name, defect[name])

    def __len__(self) -> int:
        return len(self.mask_index)

    def masks(self) -> Any:
        return self.defect.get("masks", super().masks())

    def advance(self, token_ids: Any) -> Any:
        del token_ids
        return self.defect.get("advance", self)

    def __getitem__(self, ancestors: Any) -> Any:
        del ancestors
        return self.defect.get("selected", self)


@pytest.mark.parametrize(
    ("defect", "error", "message"),
    [
        ({"masks": None}, TypeError, "Broken.masks returned NoneType; expected a pair"),
        ({"masks": [[0, 1], [0, 1]]}, TypeError, "Broken.masks returned list; expected a pair"),
        ({"advance": None}, TypeError, "Broken, advance, is NoneType; expected a Constraint"),
        ({"advance": NoTwo(np.zeros(3, int))}, ValueError, "has 3 members; expected 2"),
        ({"selected": None}, TypeError, "Broken, indexing, is NoneType; expected a Constraint"),
        ({"selected": NoTwo(np.zeros(1, int))}, ValueError, "has 1 members; expected 2"),
        ({"log_potential": np.zeros(3)}, ValueError, r"Broken.log_potential has shape \(3,\)"),
        ({"log_potential": [math.nan, 0]}, ValueError, "Broken.log_potential is NaN or inf"),
        ({"log_potential": [True, True]}, TypeError, "Broken.log_potential has booleans"),
        ({"finished": [False]}, ValueError, r"Broken.finished has shape \(1,\) and type bool"),
        ({"finished": [0, 1]}, ValueError, r"type int64; expected \(2,\) booleans"),
        ({"finished": len}, ValueError, r"shape \(\) and type object; expected \(2,\)"),
    ],
)
def test_a_defect_of_a_constraint_of_ones_own_is_named(llm, defect, error, message):
    options: dict[str, Any] = {"resample_below": 1.0, "potential": lambda _: [0.0, 2.0]}
    with pytest.raises(error, match=message):
        last(llm, 2, constraint=Broken(2, **defect), seed=0, **options)


class Tensors(ManyThrees):
    """The same constraint with tensors as attributes."""

    def __init__(self, texts: list[tuple[int, ...]]) -> None:
        super().__init__(texts)
        self.finished = torch.tensor([text[-2:] == (1, 1) for text in texts])
        self.log_potential = torch.from_numpy(self.log_potential)


def test_attributes_of_a_constraint_may_be_tensors(llm):
    constraint = Tensors([PROMPT] * 30)
    assert repr(constraint) == "<Tensors: 30 members, 0 finished, 0 dead>"
    particles = last(llm, 30, constraint=constraint, seed=1)
    other = last(llm, 30, potential=potential, stop=[END, b"\1\1"], seed=1)
    assert particles.population.tokens.tolist() == other.population.tokens.tolist()
    np.testing.assert_allclose(particles.log_weights, other.log_weights, atol=1e-5)


def test_a_constraint_cannot_be_iterated():
    constraint = NoTwo(np.zeros(3, int))
    for use in (list, lambda constraint: 0 in constraint):
        with pytest.raises(TypeError, match=r"not iterable|not a container"):
            use(constraint)


def test_the_end_of_a_constraint_ends_a_particle(make_model):
    llm = make_model(ScriptedEngine(VOCABULARY))
    assert llm.vocabulary.eos_token_id is None
    text = bytes(llm.byte_vocab[1]) + bytes(llm.byte_vocab[3])
    successors = np.full((len(text) + 1, 256), -1)
    successors[np.arange(len(text)), list(text)] = np.arange(1, len(text) + 1)
    language = Automaton(successors, np.arange(len(text) + 1) == len(text))
    *_, steps = steer_sync(llm, PROMPT, 4, max_tokens=9, constraint=language, seed=0)
    assert steps.population.finished.all()
    assert steps.population.tokens.tolist() == [[*PROMPT, 1, 3]] * 4


@pytest.mark.parametrize("resample_below", [0, 0.5, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("is_constrained", [False, True], ids=["free", "constrained"])
def test_estimates_of_steer_are_those_of_enumeration(
    llm, temperature, is_constrained, resample_below
):
    """E[Z weight(x)] is probability times potential; the seeds are fixed."""
    exact = {
        ids: probability(ids) * math.exp(potential_of(ids))
        for ids in continuations()
        if not (is_constrained and 2 in ids[1:])
    }
    size, count = 40, 40
    constraint = NoTwo(np.arange(size) % 2) if is_constrained else None
    estimates = []
    for seed in range(count):
        particles = last(
            llm,
            size,
            potential=potential,
            constraint=constraint,
            temperature=temperature,
            resample_below=resample_below,
            seed=seed,
        )
        assert (
            particles.population.finished.numpy() >= np.isneginf(particles.log_weights)
        ).all()
        mass = dict.fromkeys(exact, 0.0)
        pairs = zip(particles.population, np.exp(particles.log_weights), strict=True)
        for context, weight in pairs:
            if weight:
                mass[context.token_ids] += weight / size
        assert math.exp(particles.log_evidence) == pytest.approx(sum(mass.values()))
        estimates.append([sum(mass.values()), *mass.values()])
    expected = np.array([sum(exact.values()), *exact.values()])
    likely = expected > 0.03 * expected[0]
    assert likely.sum() >= 4
    errors = np.std(estimates, axis=0, ddof=1)[likely] / math.sqrt(count)
    assert 0 < errors[0] < 0.05 * expected[0]
    deviations = np.abs(np.mean(estimates, axis=0) - expected)[likely]
    assert (deviations < 4.5 * errors).all()


def value(token_ids: tuple[int, ...], allowed: list[int]) -> float:
    """The mass of all continuations by allowed tokens, relative to the model's."""
    if token_ids[1:] and (token_ids[-1] == END or len(token_ids) == 1 + STEPS):
        return math.exp(potential_of(token_ids))
    row = oracle_row(token_ids, None, VOCABULARY).double().exp().tolist()
    return sum(row[token] * value((*token_ids, token), allowed) for token in allowed)


def log_values(population: Any, allowed: list[int]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log([value(context.token_ids, allowed) for context in population])


def twist(population: Any, allowed: list[int]) -> np.ndarray:
    """The log-value of each next token of each member, shape `(n, VOCABULARY)`."""
    children = [population.extend(np.full(len(population), v)) for v in range(VOCABULARY)]
    return np.stack([log_values(each, allowed) for each in children], axis=1)


class OwnDraw(NoTwo):
    """A constraint whose draws have a bias of their own."""

    async def draw(self, population: Any, **options: Any) -> Any:
        allowed = torch.full((VOCABULARY,), 0.0)
        allowed[2] = -math.inf
        bias = twist(population, [0, 1, 3])
        return await population.draw(bias=allowed + torch.from_numpy(bias), **options)

    def advance(self, token_ids: Any) -> OwnDraw:
        return OwnDraw(self.mask_index)

    def __getitem__(self, ancestors: Any) -> OwnDraw:
        return OwnDraw(self.mask_index[ancestors])


def test_a_language_is_compiled_on_another_thread(llm):
    threads = []

    class Recorded(Language):
        def start(self, llm, size, **options):
            threads.append(threading.current_thread())
            return Automaton.regex(".*").start(llm, size, **options)

    async def program() -> None:
        async for _ in steer(llm, PROMPT, 3, max_tokens=1, constraint=Recorded(), stop=[END]):
            pass

    asyncio.run(program())
    assert threads != [threading.main_thread()]


@pytest.mark.parametrize("form", ["free", "coroutine", "constrained", "own"])
def test_weights_under_the_optimal_twist_are_the_evidence(llm, form):
    """The proposal is the target, so each estimate is exact."""
    allowed = [0, 1, 2, 3] if form in {"free", "coroutine"} else [0, 1, 3]

    async def slow_twist(population: Any) -> Any:
        await population.next_token_logprobs()
        return torch.from_numpy(twist(population, allowed))

    options: dict[str, Any] = {"potential": lambda population: log_values(population, allowed)}
    if form != "own":
        options["bias"] = lambda population: twist(population, allowed)
    if form == "coroutine":
        options["bias"] = slow_twist
    if form in {"constrained", "own"}:
        options["constraint"] = {"own": OwnDraw, "constrained": NoTwo}[form](np.zeros(20, int))
    particles = last(llm, 20, seed=0, **options)
    assert len({context.token_ids for context in particles.population}) > 5
    np.testing.assert_allclose(
        particles.log_weights, math.log(value(PROMPT, allowed)), atol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("is_constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize(
    "bias",
    [torch.tensor([-0.5, 0.3, 1.2, -0.7]), lambda population: np.eye(4)[np.arange(40) % 4]],
    ids=["array", "function"],
)
def test_a_bias_changes_the_proposal_and_not_the_target(llm, bias, is_constrained, temperature):
    allowed = [0, 1, 3] if is_constrained else [0, 1, 2, 3]
    estimates = []
    for seed in range(60):
        particles = last(
            llm,
            40,
            potential=potential,
            constraint=NoTwo(np.zeros(40, int)) if is_constrained else None,
            bias=bias,
            temperature=temperature,
            seed=seed,
        )
        estimates.append(math.exp(particles.log_evidence))
    exact, error = value(PROMPT, allowed), np.std(estimates, ddof=1) / math.sqrt(60)
    assert error < 0.05 * exact
    assert abs(np.mean(estimates) - exact) < 4.5 * error


@pytest.mark.parametrize("resample_below", [0, 1])
def test_the_members_of_a_population_are_the_first_particles(llm, resample_below):
    """Of different prompts, one of them finished: the mean of the expectations of each."""
    prompts = [(2,), (3, 3, 2), (1, 3), (2,), (3, 3, 2)] * 8
    population = llm.population(prompts).finish([prompt == (1, 3) for prompt in prompts])
    assert potential_of((1, 3)) == 0.7
    exact = {(1, 3): 0.2 * math.exp(0.7)}
    for prompt in ((2,), (3, 3, 2)):
        for ids in continuations(prompt):
            exact[ids] = 0.4 * probability(ids, prompt) * math.exp(potential_of(ids))
    estimates, options = [], {"max_tokens": STEPS, "stop": [END], "potential": potential}
    for seed in range(40):
        *_, particles = steer_sync(
            llm, population, resample_below=resample_below, seed=seed, **options
        )
        mass = dict.fromkeys(exact, 0.0)
        for context, weight in zip(
            particles.population, np.exp(particles.log_weights), strict=True
        ):
            if weight:
                mass[context.token_ids] += weight / len(prompts)
        estimates.append([sum(mass.values()), *mass.values()])
    expected = np.array([sum(exact.values()), *exact.values()])
    likely = expected > 0.03 * expected[0]
    errors = np.std(estimates, axis=0, ddof=1)[likely] / math.sqrt(len(estimates))
    deviations = np.abs(np.mean(estimates, axis=0) - expected)[likely]
    assert (deviations < 4.5 * errors + 1e-6).all()
    for ids, row in zip(particles.population, particles.history.token_ids, strict=True):
        new_ids = tuple(token_id for token_id in row.tolist() if token_id >= 0)
        assert ids.token_ids[len(ids) - len(new_ids) :] == new_ids
        assert ids.token_ids[: len(ids) - len(new_ids)] in prompts
    assert particles.texts == [llm.decode(row) for row in particles.history.token_ids]


def test_a_filter_continues_another_one_with_its_weights(llm):
    """Two filters make the steps of one, if the potential of the first is divided out."""
    options: dict[str, Any] = {"stop": [END], "resample_below": 0, "seed": 4}

    def count(population: Any) -> Any:
        return -0.4 * (population.tokens == 3).sum(1).double()

    *_, whole = steer_sync(llm, PROMPT, 20, max_tokens=STEPS, potential=count, **options)
    *_, first = steer_sync(llm, PROMPT, 20, max_tokens=1, potential=count, **options)
    *_, last = steer_sync(
        llm,
        first.population,
        max_tokens=STEPS - 1,
        log_weights=torch.from_numpy(first.log_weights) - count(first.population),
        potential=count,
        **options,
    )
    assert last.population.tokens.tolist() == whole.population.tokens.tolist()
    assert np.ptp(whole.log_weights) > 0
    np.testing.assert_allclose(last.log_weights, whole.log_weights, atol=1e-6)
    assert last.log_evidence == pytest.approx(whole.log_evidence)


def test_a_filter_that_continues_another_one_resamples_with_other_numbers(make_model):
    """The evidence is the mean over both first tokens, also if both filters have one seed."""
    llm, prompt = make_model(ScriptedEngine(2)), [0, 0, 0, 0]
    factors = np.cumprod([[1, 1], [1, 4], [1, 1], [1, 4], [30, 1]], axis=0)

    def potential(population: Any) -> Any:
        tokens = population.tokens.numpy()
        return np.log(factors[tokens.shape[1] - 4, tokens[:, 4]])

    options: dict[str, Any] = {"max_tokens": 2, "potential": potential, "resample_below": 1}
    estimates = []
    for seed in range(400):
        *_, first = steer_sync(llm, prompt, 2, seed=seed, **options)
        weights = first.log_weights - potential(first.population)
        *_, second = steer_sync(
            llm, first.population, log_weights=weights, seed=seed, **options
        )
        estimates.append(math.exp(second.log_evidence))
    exact = oracle_row(prompt, None, 2).exp().numpy() @ factors[-1]
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - exact) < 4 * error


def test_first_particles_without_weight_draw_no_token(llm):
    log_weights = [-math.inf, 0.5, -math.inf]
    *_, particles = steer_sync(llm, PROMPT, 3, max_tokens=2, log_weights=log_weights, seed=0)
    assert particles.history[0].token_ids[[0, 2]].tolist() == [-1, -1]
    assert particles.population.lengths.max() == 3
    assert particles.log_evidence == pytest.approx(0.5 - math.log(3))


def test_the_number_of_particles_is_that_of_the_members_of_a_population(llm):
    population = llm.population(PROMPT, 3)
    assert len(next(steer_sync(llm, population, 3, max_tokens=1))) == 3
    with pytest.raises(ValueError, match="a population of 3 members for 2 particles"):
        next(steer_sync(llm, population, 2, max_tokens=1))
    with pytest.raises(ValueError, match="size=0"):
        next(steer_sync(llm, population[[]], max_tokens=1))
    with pytest.raises(TypeError, match="size=None; expected an integer"):
        next(steer_sync(llm, PROMPT, max_tokens=1))
    with pytest.raises(TypeError, match="several prompts; call batch_steer"):
        next(steer_sync(llm, [PROMPT, PROMPT], 2, max_tokens=1))
    particles = next(steer_sync(llm, population, max_tokens=1))
    with pytest.raises(TypeError, match=r"pass particles.population and\s+log_weights="):
        next(steer_sync(llm, particles, max_tokens=1))


def test_a_population_of_another_model_is_refused(llm, make_model):
    population = make_model(ScriptedEngine(VOCABULARY)).population(PROMPT, 3)
    with pytest.raises(ValueError, match=r"<Population.* belongs to a different model"):
        next(steer_sync(llm, population, max_tokens=1))


def test_a_finished_member_leaves_its_room_to_the_others(make_model):
    llm = make_model(ScriptedEngine(VOCABULARY, max_context=3))
    population = llm.population([(2, 1, 3), PROMPT]).finish([True, False])
    *_, particles = steer_sync(llm, population, max_tokens=50, seed=0)
    assert particles.population.lengths.tolist() == [3, 4]


def test_a_population_of_finished_members_is_logged_and_its_sequences_continue(llm, caplog):
    finished = llm.population([PROMPT, (3, 3)]).finish([True, False])
    assert len(list(steer_sync(llm, finished, max_tokens=2, stop=(), seed=0))) == 2
    assert not caplog.records
    finished = finished.finish([False, True])
    [particles] = steer_sync(llm, finished, max_tokens=2, stop=(), seed=0)
    assert particles.population.lengths.tolist() == [1, 2]
    assert caplog.text.count("all 2 members of the population are finished") == 1
    *_, particles = steer_sync(llm, finished.resume(), max_tokens=2, stop=(), seed=0)
    assert particles.population.lengths.tolist() == [3, 4]


def test_weights_of_tempered_draws_are_ratios_of_probabilities(llm):
    particles = last(llm, 30, temperature=0.5, resample_below=0, seed=3)
    for context, log_weight in zip(particles.population, particles.log_weights, strict=True):
        ids, expected = context.token_ids, 0.0
        for place in range(1, len(ids)):
            row = oracle_row(ids[:place], None, VOCABULARY).double()
            drawn = torch.log_softmax(row / 0.5, 0)
            expected += float(row[ids[place]] - drawn[ids[place]])
        assert log_weight == pytest.approx(expected, abs=1e-5)


def test_resampling_happens_never_or_whenever_weights_differ(llm):
    for resample_below in (0, 1):
        states = list(
            steer_sync(
                llm,
                PROMPT,
                20,
                max_tokens=STEPS,
                potential=potential,
                resample_below=resample_below,
                seed=0,
            )
        )
        for state in states[:-1]:
            in_order = state.ancestors.tolist() == list(range(20))
            assert in_order == (resample_below == 0)
            assert (np.ptp(state.log_weights) == 0) == (resample_below == 1)


def test_a_step_tells_that_it_resampled_also_if_each_particle_is_its_own_ancestor(llm):
    *_, last = states = list(
        steer_sync(
            llm,
            PROMPT,
            3,
            max_tokens=STEPS,
            potential=lambda population: [1e-3, 2e-3, 3e-3],
            resample_below=1,
            stop=(),
            seed=0,
        )
    )
    step = last.history[0]
    assert step.ancestors.tolist() == [0, 1, 2]
    assert step.is_resampled
    assert np.ptp(states[0].log_weights) == 0 < np.ptp(step.log_weights)


def test_a_stop_text_of_several_tokens_finishes_a_particle_also_after_resampling(llm):
    steps = 6
    prompt = [*PROMPT, 2]  # a stop text does not begin in the prompt
    states = list(
        steer_sync(
            llm,
            prompt,
            40,
            max_tokens=steps,
            potential=lambda population: 0.7 * (population.tokens == 2).sum(1),
            resample_below=1,
            stop=[b"\2\2", 3],
            seed=1,
        )
    )
    assert sum(step.is_resampled for step in states[-1].history) == len(states) - 1
    crossed = 0
    for state in states:
        flags = state.population.finished.tolist()
        for context, is_finished in zip(state.population, flags, strict=True):
            ids = context.token_ids[len(prompt) :]
            ends = [i for i in range(1, len(ids) + 1) if 3 in ids[:i] or ids[:i][-2:] == (2, 2)]
            assert is_finished == bool(ends)
            assert ends in ([], [len(ids)])
            crossed += len(ids) > 2 and ids[-2:] == (2, 2)
    assert crossed > 10


def test_particles_keep_their_weights_after_the_last_step(llm, make_model):
    *_, full = steer_sync(
        llm, PROMPT, 20, max_tokens=STEPS, potential=potential, resample_below=1, seed=0
    )
    assert not full.history[-1].is_resampled
    assert full.history[-2].is_resampled
    assert np.ptp(full.log_weights) > 0
    np.testing.assert_array_equal(full.log_weights, full.history[-1].log_weights)

    ended = make_model(ScriptedEngine(VOCABULARY))
    tokens = torch.arange(ended.vocab_size).tolist()  # every token ends a particle
    [state] = steer_sync(
        ended,
        PROMPT,
        5,
        max_tokens=9,
        potential=lambda population: -3.0 * np.arange(len(population)),
        resample_below=1,
        stop=tokens,
        seed=0,
    )
    assert state.population.finished.all()
    np.testing.assert_allclose(state.log_weights, -3.0 * np.arange(5), atol=1e-6)
    assert state.ancestors.tolist() == list(range(5))


def test_ancestors_and_tokens_tell_how_particles_came_about(llm):
    before = [PROMPT] * 20
    for state in steer_sync(
        llm, PROMPT, 20, max_tokens=6, potential=potential, stop=[END], seed=1
    ):
        grown = [
            (*ids, token) if token >= 0 else ids
            for ids, token in zip(before, state.token_ids.tolist(), strict=True)
        ]
        before = [context.token_ids for context in state.population]
        assert before == [grown[ancestor] for ancestor in state.ancestors]


def test_the_filter_ends_when_all_particles_are_dead_or_finished(llm):
    dead = list(
        steer_sync(llm, PROMPT, 5, max_tokens=9, potential=lambda _: [-math.inf] * 5, seed=0)
    )
    assert len(dead) == 1
    assert dead[0].log_evidence == -math.inf
    assert dead[0].population.finished.all()
    finished = list(
        steer_sync(llm, PROMPT, 5, max_tokens=9, stop=list(range(VOCABULARY)), seed=0)
    )
    assert len(finished) == 1
    assert finished[0].log_weights.tolist() == [0] * 5
    assert list(steer_sync(llm, PROMPT, 5, max_tokens=0)) == []


def test_a_full_context_ends_the_filter_and_finishes_no_particle(make_model, caplog):
    llm = make_model(ScriptedEngine(VOCABULARY, max_context=3))
    states = list(steer_sync(llm, PROMPT, 6, max_tokens=50, seed=0))
    assert len(states) == 3
    assert states[-1].population.lengths.tolist() == [4] * 6
    assert states[-1].log_evidence == pytest.approx(0, abs=1e-6)
    assert not states[-1].population.finished.any()
    assert "6 of 6 continuations ended before max_tokens=50" in caplog.text
    caplog.clear()
    assert len(list(steer_sync(llm, PROMPT, 6, max_tokens=3, seed=0))) == 3
    assert not caplog.text


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_the_potential_is_evaluated_every_few_steps_and_in_the_last_one(llm, every):
    """Without resampling, the weights do not depend on the steps of the evaluations."""
    lengths = []

    def counted(population: Any) -> list[float]:
        lengths.append(int(population.lengths.max()))
        return potential(population)

    options: dict[str, Any] = {"max_tokens": 7, "resample_below": 0, "seed": 2}
    particles = last(llm, 30, potential=counted, potential_every=every, **options)
    steps = [*range(every, 7, every), 7]
    assert lengths == [len(PROMPT) + step for step in steps]
    expected = last(llm, 30, potential=potential, **options)
    np.testing.assert_allclose(particles.log_weights, expected.log_weights, atol=1e-12)
    lengths.clear()
    dead = last(llm, 30, potential=lambda p: counted(p) and [-math.inf] * 30, stop=(), seed=2)
    assert len(dead.history) == len(lengths) == 1
    lengths.clear()
    [ended] = steer_sync(
        llm,
        PROMPT,
        30,
        potential=counted,
        potential_every=every,
        stop=list(range(VOCABULARY)),
        max_tokens=9,
    )
    assert ended.population.finished.all()
    assert len(lengths) == 1


def test_estimates_do_not_depend_on_the_steps_in_which_the_potential_is_evaluated(llm):
    exact, estimates = value(PROMPT, list(range(VOCABULARY))), []
    for seed in range(60):
        particles = last(
            llm, 40, potential=potential, potential_every=2, resample_below=1, seed=seed
        )
        resampled_after = [step.is_resampled for step in particles.history]
        assert resampled_after[1:] == [True, False]
        estimates.append(math.exp(particles.log_evidence))
    error = np.std(estimates, ddof=1) / math.sqrt(60)
    assert 0 < error < 0.05 * exact
    assert abs(np.mean(estimates) - exact) < 4.5 * error


class Ending(NoTwo):
    """A constraint that finishes members with token 0 and makes others violate it."""

    def advance(self, token_ids: Any) -> Ending:
        after = Ending(self.mask_index)
        after.finished = token_ids == END
        after.log_potential = np.where(token_ids == END, 0.0, -np.inf)
        return after


def test_the_potential_is_evaluated_if_a_constraint_ends_the_filter(llm):
    constraint = Ending(np.zeros(40, int))
    [particles] = steer_sync(
        llm,
        PROMPT,
        40,
        max_tokens=9,
        constraint=constraint,
        potential=lambda population: np.full(len(population), 2.5),
        potential_every=4,
        seed=0,
    )
    ended = particles.token_ids == END
    assert 0 < ended.sum() < 40
    row = oracle_row(PROMPT, None, VOCABULARY).exp()
    mass = math.log(float(row[[0, 1, 3]].sum()))
    np.testing.assert_allclose(particles.log_weights[ended], mass + 2.5, atol=1e-6)
    assert np.isneginf(particles.log_weights[~ended]).all()


WRONG_POTENTIALS = {
    "NaN or inf for 2 of 2 particles, the first at index 0": [math.nan, math.nan],
    "NaN or inf for 1 of 2 particles, the first at index 1": [-math.inf, math.inf],
    r"shape \(3,\); expected one number for each of 2 particles": [0, 0, 0],
}


@pytest.mark.parametrize("message", WRONG_POTENTIALS)
def test_a_potential_that_is_no_log_factor_is_refused(llm, message):
    with pytest.raises(ValueError, match=f"the potential .*{message}"):
        last(llm, 2, potential=lambda _: WRONG_POTENTIALS[message])


def test_a_potential_of_a_dead_particle_may_be_nan(llm):
    values = [-math.inf, math.nan, math.nan]

    def potential(population: Any) -> Any:
        return torch.where(population.tokens[:, len(PROMPT)] == 0, values.pop(0), 0.0)

    particles = last(
        llm, 50, potential=potential, resample_below=0, stop=[], max_tokens=3, seed=0
    )
    dead = particles.population.tokens[:, len(PROMPT)] == 0
    assert 0 < dead.sum() < 50
    np.testing.assert_array_equal(np.isneginf(particles.log_weights), dead)


def test_a_potential_may_be_a_coroutine_function(llm):
    async def scored(population: Any) -> Any:
        rows = await llm.batch_next_token_logprobs([*population])
        return rows[:, 0]

    def blocking(population: Any) -> Any:
        return llm.batch_next_token_logprobs_sync([*population])[:, 0]

    async def collected() -> Any:
        options: dict[str, Any] = {"max_tokens": 3, "stop": [], "seed": 3}
        return [
            particles async for particles in steer(llm, PROMPT, 9, potential=scored, **options)
        ][-1]

    expected = last(llm, 9, potential=blocking, stop=[], seed=3, max_tokens=3)
    for particles in (
        asyncio.run(collected()),
        last(llm, 9, potential=scored, stop=[], seed=3, max_tokens=3),
    ):
        np.testing.assert_array_equal(particles.log_weights, expected.log_weights)
        assert torch.equal(particles.population.tokens, expected.population.tokens)


@pytest.mark.parametrize("wait", [lambda: asyncio.sleep(0), lambda: asyncio.to_thread(int)])
def test_a_potential_that_needs_an_event_loop_is_refused_without_one(llm, wait):
    async def potential(population: Any) -> Any:
        await wait()
        return [0.0] * len(population)

    with pytest.raises(RuntimeError) as error:
        last(llm, 2, potential=potential, max_tokens=1)
    message = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert "may await only methods of models" in message
    assert "call the coroutine form" in message

    async def collected() -> int:
        states = steer(llm, PROMPT, 2, potential=potential, max_tokens=1)
        return len([particles async for particles in states])

    assert asyncio.run(collected()) == 1


def test_arguments_that_steer_cannot_use_are_refused(llm):
    refused = {
        "size=0": (ValueError, {"size": 0}),
        "texts of languages end with token ids": (
            TypeError,
            {"stop": ["."], "constraint": Automaton.regex("a+")},
        ),
        "outside the vocabulary": (ValueError, {"stop": [VOCABULARY]}),
        "expected a Language or a Constraint": (TypeError, {"constraint": "ab"}),
        r"constraint=\[<Automaton.*expected a Language": (
            TypeError,
            {"constraint": [Automaton.regex("a+")]},
        ),
        "texts of languages are bytes": (
            TypeError,
            {"constraint": Automaton.regex("a+"), "text": "a"},
        ),
        "texts of a Language": (ValueError, {"text": b"a"}),
        r"text=\[b''\]; texts of languages are bytes": (
            TypeError,
            {"constraint": Automaton.regex("a+"), "text": [b""]},
        ),
        "max_tokens=-1; it must be 0": (ValueError, {"max_tokens": -1}),
        "max_tokens='3'; expected an integer": (TypeError, {"max_tokens": "3"}),
        "seed=-1; it must be 0": (ValueError, {"seed": -1}),
        "seed=1.5; expected an integer": (TypeError, {"seed": 1.5}),
        "temperature=.*; expected a number": (TypeError, {"temperature": np.ones(2)}),
        "resample_below='a'; expected a number": (TypeError, {"resample_below": "a"}),
        "potential=1.0; expected a function": (TypeError, {"potential": 1.0}),
        "potential_every=0; it must be 1": (ValueError, {"potential_every": 0}),
        "booleans; expected log-factors: 0": (TypeError, {"potential": lambda _: [True] * 2}),
        "the potential has booleans": (
            TypeError,
            {"potential": lambda _: torch.ones(2, dtype=torch.bool)},
        ),
        "the potential is NoneType": (TypeError, {"potential": lambda _: None}),
        "the potential is str": (TypeError, {"potential": lambda _: "ab"}),
        "the potential is list": (TypeError, {"potential": lambda _: [[0.0], [0.0, 1]]}),
        "a bias of shape .7,.": (ValueError, {"bias": [0.0] * 7}),
        "bias has values of type": (TypeError, {"bias": lambda _: "ab"}),
        "log_weights has shape .3,.": (ValueError, {"log_weights": [0.0] * 3}),
        "log_weights is NaN or inf for 1 of 2": (ValueError, {"log_weights": [0, math.nan]}),
        "log_weights is list": (TypeError, {"log_weights": [None, 0.0]}),
        "the potential is Tensor": (
            TypeError,
            {"potential": lambda _: torch.zeros(2, dtype=torch.complex64)},
        ),
    }
    for message, (error, options) in refused.items():
        with pytest.raises(error, match=message):
            next(steer_sync(llm, PROMPT, **{"size": 2, "max_tokens": 1, **options}))


def test_the_blocking_form_has_the_signature_and_the_docstring_of_steer():
    assert inspect.signature(steer_sync) == inspect.signature(steer)
    assert "The blocking form of `steer`" in steer_sync.__doc__
    assert steer_sync.__name__ == "steer_sync"
    assert "resample_below:" in steer_sync.__doc__


def test_a_seed_reproduces_a_filter_in_both_forms(llm):
    options: dict[str, Any] = {"max_tokens": STEPS, "potential": potential, "stop": [END]}

    async def collected(seed: int) -> list[Any]:
        return [particles async for particles in steer(llm, PROMPT, 20, seed=seed, **options)]

    first = asyncio.run(collected(4))
    again = list(steer_sync(llm, PROMPT, 20, seed=4, **options))
    for one, another in zip(first, again, strict=True):
        assert torch.equal(one.population.tokens, another.population.tokens)
        np.testing.assert_array_equal(one.log_weights, another.log_weights)
        np.testing.assert_array_equal(one.ancestors, another.ancestors)
    other = last(llm, 20, potential=potential, seed=5)
    assert other.population.tokens.tolist() != first[-1].population.tokens.tolist()


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_that_is_out_of_range_is_refused(llm, share):
    with pytest.raises(ValueError, match="resample_below"):
        next(steer_sync(llm, PROMPT, 2, max_tokens=1, resample_below=share))


def test_particles_are_resampled_if_their_weights_are_unequal_and_keep_the_mean() -> None:
    log_weights = np.log([0.5, 3.0, 0.25, 0.25])
    ancestors, result = resampled(log_weights, 0.4)
    assert ancestors.tolist() == systematic_resampling(log_weights, 0.4).tolist()
    assert len(set(ancestors.tolist())) < 4
    np.testing.assert_allclose(np.exp(result), 1)
    for unchanged, below in ((log_weights, 0.2), (np.zeros(4), 1.0)):
        ancestors, result = resampled(unchanged, 0.4, below)
        assert ancestors.tolist() == [0, 1, 2, 3]
        assert np.array_equal(result, unchanged)
    with pytest.raises(ValueError, match="no particle survived"):
        resampled(np.full(4, -np.inf), 0.4)
