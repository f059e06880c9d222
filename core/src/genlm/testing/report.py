"""The report of a run, as text and as JSON."""

from __future__ import annotations

import dataclasses
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from genlm.plugin import installed_versions
from genlm.testing.outcome import Outcome
from genlm.testing.run import Run

_LIBRARIES = ("torch", "numpy", "hypothesis")


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes of a run and the environment.

    Attributes:
        run: The run.
        outcomes: One per case.
    """

    run: Run
    outcomes: Sequence[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that count as failures of the backend."""
        return [outcome for outcome in self.outcomes if self.run.fails(outcome)]

    @property
    def certified(self) -> bool:
        """Whether every applicable check of all targets of the backend ran and passed."""
        settings = self.run.settings
        is_complete = not settings.only and not settings.models and settings.model is None
        return (
            is_complete
            and not self.untested
            and all(o.status in {"passed", "not applicable"} for o in self.outcomes)
        )

    @property
    def untested(self) -> list[str]:
        """Capabilities that the backend's spec lists and no engine of its targets declares."""
        needed = [
            (case.check.needs, o.status) for case, o in zip(self.run.cases, self.outcomes)
        ]
        tested = {needs for needs, status in needed if status != "not applicable"}
        skipped = {needs for needs, _ in needed} - tested
        return [name for name in self.run.info.capabilities if name in skipped]

    def as_json(self) -> dict[str, Any]:
        """The whole report as plain values."""
        settings = dataclasses.asdict(self.run.settings)
        return {
            **_environment(self.run),
            "settings": settings | {"xfail": str(settings["xfail"] or "")},
            "devices": sorted(_devices(self.outcomes)),
            "certified": self.certified,
            "counts": dict(Counter(outcome.status for outcome in self.outcomes)),
            "seconds": sum(outcome.seconds for outcome in self.outcomes),
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }

    def as_text(self) -> str:
        """The failures and a summary."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for first, *similar in _group_by_cause(self.failures):
            yield from ("", *describe(first))
            if similar:
                yield f"  likewise  {', '.join(outcome.id for outcome in similar)}"
        environment, settings = _environment(self.run), self.run.settings
        versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items())
        yield ""
        yield f"backend  {environment['backend']} ({versions}; Python {environment['python']})"
        yield f"device   {', '.join(sorted(_devices(self.outcomes))) or 'unknown'}"
        yield f"run      profile {settings.profile}, seed {settings.seed}"
        counts = Counter(outcome.status for outcome in self.outcomes)
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        totals = ", ".join(f"{count} {status}" for status, count in counts.items())
        yield f"checks   {totals} in {seconds:.1f} s"
        if settings.model is not None:
            yield (
                "oracle   none: compared with the engine's own rows, one at a time, uncached"
            )
        yield f"result   {self._verdict()}"

    def _verdict(self) -> str:
        if self.failures:
            return f"{len(self.failures)} failed"
        if self.certified:
            return f"{self.run.settings.backend} is certified"
        if self.untested:
            return (
                f"not certified: the BackendSpec lists {', '.join(self.untested)}, which no "
                f"target's engine declares"
            )
        return "no failures; only a complete run that passes every check certifies"


def _group_by_cause(failures: Iterable[Outcome]) -> list[list[Outcome]]:
    """Group failures that differ in numbers only, because one bug fails many checks.

    The addresses of objects are numbers, too.
    """
    groups: dict[object, list[Outcome]] = {}
    for outcome in failures:
        cause = re.sub(r"0x[0-9a-f]+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", outcome.found)
        key = (outcome.status, outcome.expected, cause) if cause else outcome.id
        groups.setdefault(key, []).append(outcome)
    return list(groups.values())


def one_line(outcome: Outcome) -> str:
    """An outcome in one line, printed during the run."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.status:<16} {outcome.seconds:6.2f} s  {outcome.id}{reason}"


def describe(outcome: Outcome) -> list[str]:
    """A failure: the property, what was expected and found, and the smallest example."""
    lines = [f"{outcome.status.upper()} {outcome.id}", f"  property  {outcome.property}"]
    if outcome.reason:
        lines.append(f"  reason    {outcome.reason}")
    if outcome.expected:
        lines.append(f"  expected  {outcome.expected}")
        lines.append(f"  found     {outcome.found}")
    if outcome.hint:
        lines.append(f"  hint      {outcome.hint}")
    lines += [f"  with      {name} = {value}" for name, value in outcome.example.items()]
    lines += [f"    {line}" for line in outcome.details.splitlines()]
    return lines


def _environment(run: Run) -> dict[str, Any]:
    distributions = dict.fromkeys(
        ("genlm-core", run.info.distribution, *run.info.requires, *_LIBRARIES)
    )
    return {
        "backend": run.info.provider,
        "versions": installed_versions(distributions),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _devices(outcomes: Iterable[Outcome]) -> set[str]:
    return {device for outcome in outcomes for device in outcome.devices}
