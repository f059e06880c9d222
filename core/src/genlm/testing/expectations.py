"""Failures that are expected, each with its reason, in a file beside the backend's code.

One line each; `#` begins a comment:

    batch-equals-map[mamba]: the scan rounds differently in batches, issue 12
    temperature-zero-is-greedy: ties are broken at random
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from genlm.testing.outcome import Outcome

__all__ = ["ExpectationError", "ExpectedFailures"]


class ExpectationError(ValueError):
    """A file of expected failures that is malformed or names what does not exist."""


@dataclass(frozen=True)
class ExpectedFailures:
    """Reasons by id of a check, or of a case: `check[model]`."""

    reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> ExpectedFailures:
        """Read a file; None expects no failure.

        Raises:
            ExpectationError: It cannot be read, a line has no reason, or an id comes twice.
        """
        if path is None:
            return cls()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ExpectationError(f"no expected failures in {path}: {error}") from error
        reasons: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            name, _, reason = (part.strip() for part in text.partition(":"))
            if not reason:
                raise ExpectationError(
                    f"{path}:{number}: expected 'id: reason', found {text!r}"
                )
            if name in reasons:
                raise ExpectationError(f"{path}:{number}: {name!r} is expected to fail twice")
            reasons[name] = reason
        return cls(reasons)

    def refuse_unmatched(self, ids: Iterable[str]) -> None:
        """Raise `ExpectationError` if an entry is none of these ids."""
        known = set(ids)
        unmatched = [name for name in self.reasons if name not in known]
        if unmatched:
            raise ExpectationError(
                f"expected to fail, but there is no such check: {', '.join(unmatched)}. "
                f"Take the line out, or name one of `genlm check BACKEND --list`"
            )

    def judge(self, outcome: Outcome) -> Outcome:
        """Turn a failure that is expected, and a pass that is not, into what they are."""
        check_id = outcome.id.partition("[")[0]
        reason = self.reasons.get(outcome.id, self.reasons.get(check_id))
        if reason is None:
            return outcome
        if outcome.status == "failed":
            return replace(outcome, status="expected failure", reason=reason)
        if outcome.status == "passed":
            reason = f"it passes; take it out of the expected failures ({reason})"
            return replace(outcome, status="unexpected pass", reason=reason)
        return outcome
