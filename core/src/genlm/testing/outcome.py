"""What became of a case, and whether that is what was expected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Outcome", "Status"]

Status = Literal[
    "passed", "failed", "skipped", "not applicable", "expected failure", "unexpected pass"
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one check of one target.

    Attributes:
        id: Of the case.
        law: What the check guards.
        status: `"skipped"`: it applies but cannot run here. `"not applicable"`: it is
            about an ability that the engine does not declare; another check sees that
            the ability is refused.
        reason: Why it was skipped, does not apply, or was expected to fail.
        expected: What the law demands, if it failed.
        found: What happened instead.
        example: The smallest example with which it happened: `repr` of each value.
        details: Hypothesis' notes and the traceback, where the failure was no
            `CheckFailure`.
        cases: How often each interesting case occurred.
        devices: On which rows were seen.
        seconds: How long it took.
    """

    id: str
    law: str
    status: Status
    reason: str = ""
    expected: str = ""
    found: str = ""
    example: dict[str, str] = field(default_factory=dict)
    details: str = ""
    cases: dict[str, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    seconds: float = 0.0
