"""`Outcome`: the result of one case, and the expected failures with their reasons.

Expected failures are listed in a file in the backend's repository, one per line, each with
its reason; `#` begins a comment:

    batch-equals-map[mamba]: the scan rounds differently in batches, issue 12
    contexts-may-be-dropped: released slots are read, issue 14
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

Status = Literal[
    "passed", "failed", "skipped", "not applicable", "expected failure", "unexpected pass"
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one check of one target.

    Attributes:
        id: Id of the case.
        property: The tested property, in one sentence.
        status: `"skipped"`: the check applies but cannot run with this target. `"not
            applicable"`: it tests an ability that the engine does not declare; another check
            tests that the ability is refused.
        reason: Reason why it was skipped, does not apply, or was expected to fail.
        expected: Description of the required result, if the property was violated.
        found: Description of the actual result.
        example: The smallest failing example: `repr` of each value, by name.
        hint: Probable cause of the failure, if it is known.
        details: Hypothesis' notes and the traceback, if the failure was not a `CheckFailure`.
        cases: Number of occurrences of each case that the check must cover.
        devices: Devices of the rows that were checked.
        seconds: Duration.
    """

    id: str
    property: str
    status: Status
    reason: str = ""
    expected: str = ""
    found: str = ""
    example: dict[str, str] = field(default_factory=dict)
    hint: str = ""
    details: str = ""
    cases: dict[str, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    seconds: float = 0.0

    def expecting(self, reasons: Mapping[str, str]) -> Outcome:
        """Mark a failure that is expected, and a pass that is not.

        Args:
            reasons: The result of `read_expected_failures`.
        """
        reason = reasons.get(self.id, reasons.get(self.id.partition("[")[0]))
        if reason is not None and self.status == "failed":
            return replace(self, status="expected failure", reason=reason)
        if reason is not None and self.status == "passed":
            reason = f"it passes; remove it from the expected failures ({reason})"
            return replace(self, status="unexpected pass", reason=reason)
        return self


_EXPECTED_FAILURE = re.compile(r"([^:\[]*(?:\[[^\]]*\])?)\s*:(.+)")
"""An id, whose model may contain colons, and a reason."""


def read_expected_failures(path: Path | None) -> dict[str, str]:
    """Read the reasons of expected failures by id of a check, or of a case: `check[model]`.

    Raises:
        ValueError: The file cannot be read, a line has no reason, or an id occurs twice.
    """
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no expected failures in {path}: {error}") from error
    reasons: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _EXPECTED_FAILURE.fullmatch(text)
        if match is None:
            raise ValueError(f"{path}:{number}: expected 'id: reason', found {text!r}")
        name, reason = (part.strip() for part in match.groups())
        if name in reasons:
            raise ValueError(f"{path}:{number}: {name!r} is listed twice")
        reasons[name] = reason
    return reasons
