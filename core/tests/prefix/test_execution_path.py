"""The options of an engine, the self-test of its paths, and the choice of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch

from genlm import ModelLoadError
from genlm.core.queries.sequence import TokenSequence
from genlm.prefix import (
    PrefixRows,
    SelfTest,
    ServeOptions,
    UnsupportedModelError,
    choose_path,
)

from .test_rows import SIZE, TOKEN_BYTES, Alone, expected, serve, used

PATHS = ("fast", "tree", "alone")
Rows = Callable[[Sequence[TokenSequence]], torch.Tensor]


class Reference(Alone):
    """Rows of batches are off by `rounding`; records the longest sequence."""

    def __init__(self, rounding: float = 0) -> None:
        super().__init__()
        self.rounding, self.longest = rounding, 0

    def rows(self, adapter: str | None, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        self.longest = max(self.longest, *map(len, sequences))
        rows = super().rows(adapter, sequences)
        return rows + self.rounding * (len(sequences) > 1)


def path_with(change: Rows) -> PrefixRows:
    """A path that adds something to its rows, by their sequences."""
    path, _ = serve(300)
    compute = path.rows
    path.rows = lambda adapter, step: compute(adapter, step) + change(step)  # type: ignore[method-assign]
    return path


def error_of(
    path: PrefixRows,
    *,
    tolerance: float = 0.01,
    rounding: float = 0,
    scale_tolerance: bool = False,
    max_context: int | None = None,
    text: Sequence[int] = range(SIZE),
) -> float:
    test = SelfTest(
        text,
        Reference(rounding),
        tolerance=tolerance,
        max_context=max_context,
        scale_tolerance=scale_tolerance,
    )
    return test.largest_error(path)


def steps_of(**options: int) -> list[list[TokenSequence]]:
    """The batches of the self-test."""
    steps: list[list[TokenSequence]] = []

    def record(step: Sequence[TokenSequence]) -> torch.Tensor:
        steps.append([*step])
        return torch.zeros(1)

    error_of(path_with(record), **options)  # type: ignore[arg-type]
    return steps


def test_a_path_with_the_rows_of_the_reference_passes_without_tolerance() -> None:
    path, _ = serve(300)
    assert error_of(path, tolerance=0) == 0
    assert used(path, "kv_tokens") == 0


@pytest.mark.parametrize("step", range(3))
def test_the_error_is_the_largest_of_all_batches(step: int) -> None:
    steps = steps_of()
    assert len(steps) == 3

    def change(sequences: Sequence[TokenSequence]) -> torch.Tensor:
        errors = torch.zeros(len(sequences), SIZE)
        errors[-1, 2] = -0.5 if [*sequences] == steps[step] else 0.1
        return errors

    assert error_of(path_with(change), tolerance=0.51) == pytest.approx(0.5, abs=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"off by 5\.0e-01, more than 1\.0e-02"):
        error_of(path_with(change))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    def change(sequences: Sequence[TokenSequence]) -> torch.Tensor:
        errors = torch.zeros(len(sequences), SIZE)
        errors[0, 1] = value
        return errors

    with pytest.raises(UnsupportedModelError, match="off by inf"):
        error_of(path_with(change), tolerance=100)


def test_a_path_that_raises_is_refused() -> None:
    path, model = serve(300)
    model.fail = True
    with pytest.raises(UnsupportedModelError, match="raised RuntimeError: no memory"):
        error_of(path)


def test_a_path_that_reads_fewer_tokens_than_the_longest_context_is_refused() -> None:
    def window(size: int) -> Rows:
        def change(step: Sequence[TokenSequence]) -> torch.Tensor:
            read = [expected(None, sequence.token_ids[-size:]) for sequence in step]
            right = [expected(None, sequence.token_ids) for sequence in step]
            return torch.stack(read) - torch.stack(right)

        return change

    assert error_of(path_with(window(24))) < 1e-5
    for size in (1, 12, 22, 23):
        with pytest.raises(UnsupportedModelError):
            error_of(path_with(window(size)))


def test_errors_up_to_four_times_those_of_batching_are_accepted() -> None:
    def change(factor: float) -> Rows:
        return lambda step: torch.full((len(step), SIZE), factor * 0.1)

    assert error_of(path_with(change(3.9)), rounding=0.1, scale_tolerance=True) > 0.3
    for factor, rounding, scale in ((4.1, 0.1, True), (3.9, 0.1, False), (3.9, 0.0, True)):
        with pytest.raises(UnsupportedModelError):
            error_of(path_with(change(factor)), rounding=rounding, scale_tolerance=scale)
    error_of(path_with(change(0.09)), rounding=1e-5, scale_tolerance=True)


@pytest.mark.parametrize(
    ("max_context", "longest"), [(None, 24), (1, 1), (2, 2), (9, 9), (99, 24)]
)
def test_no_context_is_longer_than_the_model_allows(
    max_context: int | None, longest: int
) -> None:
    for text in ([3], [1, 2, 3], range(SIZE)):
        reference = Reference()
        test = SelfTest(text, reference, tolerance=0, max_context=max_context)
        assert test.largest_error(serve(300)[0]) == 0
        assert reference.longest == longest


def test_batches_have_forks_repetitions_and_continuations_of_earlier_ones() -> None:
    first, second, third = steps_of()
    for step in (first, second, third):
        assert len(set(step)) == len(step) > 1
        assert len(set(map(len, step))) > 1
    ids = [sequence.token_ids for step in (first, second, third) for sequence in step]
    new = {
        len(longer) - len(other)
        for longer in ids
        for other in ids
        if longer != other == longer[: len(other)]
    }
    assert 1 in new
    assert max(new) > 2
    assert set(first) & set(second)  # a repetition
    assert any(  # a fork
        one[:-1] == other[:-1] and one != other for one in ids for other in ids if len(one) > 1
    )


@pytest.mark.parametrize(
    ("name", "minimum"),
    [("max_tokens_per_batch", 1), ("kv_budget_bytes", 0), ("max_context", 1)],
)
def test_limits_have_minimums(name: str, minimum: int) -> None:
    ServeOptions(paths=PATHS, **{name: minimum})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=name):
        ServeOptions(paths=PATHS, **{name: minimum - 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=name):
        ServeOptions(paths=PATHS, **{name: 1.5})  # type: ignore[arg-type]


def test_unknown_execution_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="'fats'; choose one of 'fast', 'tree', 'alone', or"):
        ServeOptions(paths=PATHS, execution_path="fats")
    assert ServeOptions(paths=PATHS, execution_path="tree").execution_path == "tree"


class Builds:
    """Builds paths, of which some are unsupported, and records what is built and tested."""

    def __init__(self, *unsupported: str) -> None:
        self.unsupported = unsupported
        self.built: list[tuple[str, int | None]] = []
        self.tested: list[PrefixRows] = []

    def build(self, name: str) -> Callable[[int | None], PrefixRows]:
        def build(budget: int | None) -> PrefixRows:
            self.built.append((name, budget))
            if name in self.unsupported:
                raise UnsupportedModelError(f"{name} lacks it")
            return serve(300 if budget is None else budget // TOKEN_BYTES - 1)[0]

        return build

    def test(self, path: PrefixRows) -> float:
        self.tested.append(path)
        return 0.25

    def choose(
        self, caplog: pytest.LogCaptureFixture, **options: object
    ) -> tuple[str, str, float | None]:
        with caplog.at_level(logging.INFO, "toy"):
            choice = choose_path(
                "Toy",
                {name: self.build(name) for name in PATHS[:-1]},
                Alone(),
                options=ServeOptions(paths=PATHS, **options),  # type: ignore[arg-type]
                self_test=self.test,
                logger=logging.getLogger("toy"),
            )
        assert isinstance(choice.path, PrefixRows) == (choice.name != "alone")
        statistics = choice.statistics()
        assert statistics["execution_path"] == choice.name
        assert statistics.get("self_test_error") == choice.error
        return choice.name, choice.reason, choice.error


def test_the_first_supported_path_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    builds = Builds()
    assert builds.choose(caplog) == ("fast", "the fastest", 0.25)
    assert builds.built == [("fast", None)]
    assert (
        "Toy is served by the execution path 'fast' (the fastest; self-test error 2.5e-01)"
        in (caplog.text)
    )
    assert Builds("fast").choose(caplog) == ("tree", "not fast: fast lacks it", 0.25)
    reason = "not fast: fast lacks it; not tree: tree lacks it"
    assert Builds("fast", "tree").choose(caplog) == ("alone", reason, None)
    assert f"'alone' ({reason}; not tested)" in caplog.text


def test_a_requested_path_is_chosen_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    builds = Builds("fast")
    assert builds.choose(caplog, execution_path="tree") == ("tree", "requested", 0.25)
    assert builds.built == [("tree", None)]
    assert Builds().choose(caplog, execution_path="alone") == ("alone", "requested", None)
    with pytest.raises(ModelLoadError, match="'fast' cannot serve Toy: fast lacks it"):
        builds.choose(caplog, execution_path="fast")


def test_a_path_with_a_small_budget_is_built_again_for_the_self_test(
    caplog: pytest.LogCaptureFixture,
) -> None:
    needed = 240 * TOKEN_BYTES
    for budget, built in (
        (needed, [needed]),
        (needed - 10, [needed - 10, needed, needed - 10]),
    ):
        builds = Builds()
        builds.choose(caplog, kv_budget_bytes=budget)
        assert [one for _, one in builds.built] == built
        [tested] = builds.tested
        assert tested.budget_bytes >= needed
    untested = Builds()
    assert untested.choose(caplog, self_test=False) == ("fast", "the fastest", None)
    assert not untested.tested
