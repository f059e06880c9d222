"""The report of a run: for people, and as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from genlm.testing.outcome import Outcome
from genlm.testing.run import Run

__all__ = ["Report", "one_line"]

_LIBRARIES = ("torch", "numpy", "hypothesis")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run found, and with what.

    Attributes:
        run: What was run.
        outcomes: One per case.
    """

    run: Run
    outcomes: Sequence[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that speak against the backend."""
        return [outcome for outcome in self.outcomes if self.run.fails(outcome)]

    @property
    def certified(self) -> bool:
        """Whether every check that applies to the backend's own targets ran and passed."""
        settings = self.run.settings
        whole = not settings.only and not settings.models and settings.model is None
        return whole and all(o.status in {"passed", "not applicable"} for o in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
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
        """The failures and the sum."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for outcome in self.failures:
            yield from ("", *describe(outcome))
        environment, settings = _environment(self.run), self.run.settings
        versions = ", ".join(f"{name} {v}" for name, v in environment["versions"].items())
        yield ""
        yield f"backend  {environment['backend']} ({versions}; Python {environment['python']})"
        yield f"device   {', '.join(sorted(_devices(self.outcomes))) or 'none seen'}"
        yield f"run      profile {settings.profile}, seed {settings.seed}"
        counts = Counter(outcome.status for outcome in self.outcomes)
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        summed = ", ".join(f"{count} {status}" for status, count in counts.items())
        yield f"checks   {summed} in {seconds:.1f} s"
        if settings.model is not None:
            yield (
                "oracle   none: answers were compared with the engine's own, alone and uncached"
            )
        yield f"result   {self._verdict()}"

    def _verdict(self) -> str:
        if self.failures:
            return f"{len(self.failures)} failed"
        if self.certified:
            return f"{self.run.settings.backend} is certified"
        return "nothing failed; only a whole run that passes every check certifies"


def one_line(outcome: Outcome) -> str:
    """An outcome while the run goes on."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.status:<16} {outcome.seconds:6.2f} s  {outcome.id}{reason}"


def describe(outcome: Outcome) -> list[str]:
    """A failure with the law, what was expected and found, and the smallest example."""
    lines = [f"{outcome.status.upper()} {outcome.id}", f"  law       {outcome.law}"]
    if outcome.reason:
        lines.append(f"  reason    {outcome.reason}")
    if outcome.expected:
        lines.append(f"  expected  {outcome.expected}")
        lines.append(f"  found     {outcome.found}")
    lines += [f"  with      {name} = {value}" for name, value in outcome.example.items()]
    lines += [f"    {line}" for line in outcome.details.splitlines()]
    return lines


def _environment(run: Run) -> dict[str, Any]:
    distributions = dict.fromkeys(
        ("genlm-core", run.info.distribution, *run.info.requires, *_LIBRARIES)
    )
    versions = {name: version for name in distributions if (version := _version(name))}
    return {
        "backend": run.info.provider,
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(outcomes: Iterable[Outcome]) -> set[str]:
    return {device for outcome in outcomes for device in outcome.devices}
