"""How a check says that a law was broken."""

from __future__ import annotations

from typing import Any

__all__ = ["CheckFailure", "NeverEnded", "NotApplicable", "Skipped", "expect"]


class CheckFailure(AssertionError):
    """A law seen broken: what was expected, what was found, and with which example.

    Attributes:
        expected: What the law demands, in words.
        found: What happened instead.
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


class NeverEnded(BaseException):
    """A call that did not return in time.

    Not an `Exception`, because Hypothesis would run into the same wait again and again
    to shrink the example.

    Attributes:
        what: The call, in words.
        patience_s: How long it was waited for.
    """

    def __init__(self, what: str, patience_s: float) -> None:
        super().__init__(what, patience_s)
        self.what = what
        self.patience_s = patience_s

    def __str__(self) -> str:
        return f"{self.what} did not end within {self.patience_s:g} s"


class NotApplicable(Exception):
    """Raised by a check of something that this backend does not have; its text says what."""


class Skipped(Exception):
    """Raised by a check for which the target lacks something; its text says what."""


def expect(holds: bool, expected: str, found: object, **example: Any) -> None:
    """Raise `CheckFailure` unless the law holds.

    Args:
        holds: Whether it does.
        expected: What the law demands, in words.
        found: What happened.
        **example: The values with which it happened.
    """
    if not holds:
        raise CheckFailure(expected, str(found), example)
