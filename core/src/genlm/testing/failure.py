"""The exceptions by which a check fails, times out, is skipped or does not apply."""

from __future__ import annotations

from typing import Any

__all__ = ["CheckFailure", "CheckTimeout", "NotApplicable", "Skipped", "expect"]


class CheckFailure(AssertionError):
    """A property was violated.

    Attributes:
        expected: Description of the required result.
        found: Description of the actual result.
        example: The values with which it happened, by name.
    """

    def __init__(self, expected: str, found: str, example: dict[str, Any]) -> None:
        super().__init__(expected, found, example)
        self.expected = expected
        self.found = found
        self.example = example

    def __str__(self) -> str:
        lines = [f"expected {self.expected}", f"found    {self.found}"]
        lines += [f"with     {name} = {value!r}" for name, value in self.example.items()]
        return "\n".join(lines)


class CheckTimeout(BaseException):
    """A call did not return within its time limit.

    Not an `Exception`: Hypothesis would repeat the same wait many times to shrink the example.

    Attributes:
        what: Description of the call.
        timeout_s: The time limit.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(what, timeout_s)
        self.what = what
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"{self.what} did not end within {self.timeout_s:g} s"


class NotApplicable(Exception):
    """Raised by a check of an ability that this backend lacks; the message names it."""


class Skipped(Exception):
    """Raised by a check for which the target lacks something; the message names it."""


def expect(holds: bool, expected: str, found: object, **example: Any) -> None:
    """Raise `CheckFailure` unless a property holds.

    Args:
        holds: Whether the property holds.
        expected: Description of the required result.
        found: The actual result.
        **example: The values with which it happened.
    """
    if not holds:
        raise CheckFailure(expected, str(found), example)
