"""`Run`: everything that one certification of a backend needs, however it is started."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from genlm import BackendInfo
from genlm.testing.expectations import ExpectedFailures
from genlm.testing.outcome import Outcome
from genlm.testing.profile import PROFILES, Profile
from genlm.testing.running import run_case
from genlm.testing.selection import Case, cases_of, chosen, find, targets_of
from genlm.testing.target import EngineTarget

__all__ = ["Run", "Settings", "prepared"]


@dataclass(frozen=True)
class Settings:
    """What a user can choose.

    Attributes:
        backend: Name of an installed engine or trie.
        model: What the engine calls a model, checked without an oracle; by default the
            targets that the backend brings.
        dtype: In which that model computes; sets the tolerance.
        only: Ids of checks or cases to run; by default all.
        models: Names of targets to run; by default all.
        profile: `"quick"` or `"full"`.
        xfail: File of expected failures.
        seed: Decides every example.
        no_skips: Whether a check that could not run is a failure.
    """

    backend: str
    model: str | None = None
    only: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    profile: str = "quick"
    xfail: Path | None = None
    seed: int = 0
    no_skips: bool = False
    dtype: str = "float32"

    @property
    def numbers(self) -> Profile:
        """The profile itself.

        Raises:
            ValueError: There is none of that name.
        """
        if self.profile not in PROFILES:
            raise ValueError(f"profile={self.profile!r}: expected one of {', '.join(PROFILES)}")
        return PROFILES[self.profile]


@dataclass(frozen=True)
class Run:
    """The cases of one certification.

    Attributes:
        settings: What was asked for.
        info: The backend.
        cases: What is to be run, in order.
        expected: Which failures are expected.
    """

    settings: Settings
    info: BackendInfo
    cases: list[Case]
    expected: ExpectedFailures

    def outcome(self, case: Case) -> Outcome:
        """Run one case and judge it by what is expected."""
        return self.expected.judge(run_case(case, self.settings.numbers, self.settings.seed))

    def outcomes(self) -> Iterator[Outcome]:
        """Run all cases, one after another.

        Raises:
            Exception: What loading a model of the user's own raised: else every check
                would fail with it.
        """
        target = self.cases[0].target
        if self.settings.model is not None and isinstance(target, EngineTarget):
            target.load().close()  # the only target: its engine is shared and stays loaded
        return map(self.outcome, self.cases)

    def fails(self, outcome: Outcome) -> bool:
        """Whether an outcome speaks against the backend."""
        if outcome.status == "skipped":
            return self.settings.no_skips
        return outcome.status in {"failed", "unexpected pass"}


@contextmanager
def prepared(settings: Settings) -> Iterator[Run]:
    """Find the backend, make its targets, and clean up afterwards.

    Raises:
        PluginError: The backend is not installed or cannot be used.
        LookupError: It brings no target, or what is to be run does not exist.
        TypeError: What it brings is no target.
        ExpectationError: The file of expected failures is malformed or names nothing.
        ValueError: No such profile or dtype.
    """
    _ = settings.numbers
    info = find(settings.backend)
    with tempfile.TemporaryDirectory(prefix="genlm-check-") as folder:
        targets = targets_of(info, Path(folder), settings.model, settings.dtype)
        everything = cases_of(targets, info)
        expected = ExpectedFailures.read(settings.xfail)
        expected.refuse_unmatched(_ids(everything))
        cases = chosen(everything, settings.only, settings.models)
        try:
            yield Run(settings, info, cases, expected)
        finally:
            for target in targets:
                if isinstance(target, EngineTarget):
                    target.close()


def _ids(cases: Iterable[Case]) -> Iterator[str]:
    for case in cases:
        yield case.id
        yield case.check.id
