"""`Check`: a function that tests one property of engines or tries, and when it applies.

A check is a plain function of a fixture, decorated with `engine_check` or `trie_check`. The
first sentence of its docstring states the property. It raises `CheckFailure`, by `expect`, if
the property is violated, and `NotApplicable` or `Skipped` if it cannot be tested. It reports
the cases that it must cover with `Fixture.saw`; it fails if one of them never occurs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genlm import Capability
from genlm.testing.target import Kind

if TYPE_CHECKING:
    from genlm.testing.engine_fixture import EngineFixture
    from genlm.testing.trie_fixture import TrieFixture

_SENTENCE_END = re.compile(r"(?<=\.)\s")


@dataclass(frozen=True)
class Check:
    """A function that tests one property of engines or tries.

    Attributes:
        function: Takes a fixture; raises if the property is violated.
        kind: `"engine"` or `"trie"`.
        needs: A capability without which the check does not apply.
        member: A method of the engine or trie without which the check does not apply.
        oracle: Whether the check needs an oracle that is independent of the engine.
    """

    function: Callable[[Any], None]
    kind: Kind
    needs: Capability | None = None
    oracle: bool = False
    member: str | None = None

    @property
    def id(self) -> str:
        """The function's name, with hyphens."""
        return self.function.__name__.replace("_", "-")

    @property
    def property(self) -> str:
        """The tested property: the first sentence of the function's docstring."""
        text = " ".join((inspect.getdoc(self.function) or "").split())
        return _SENTENCE_END.split(text, maxsplit=1)[0]


def engine_check(
    *,
    needs: Capability | None = None,
    member: str | None = None,
    oracle: bool = False,
) -> Callable[[Callable[[EngineFixture], None]], Check]:
    """Create a check from a function of an `EngineFixture`; `Check` describes the arguments."""
    return lambda function: Check(function, "engine", needs, oracle, member)


def trie_check(
    *, member: str | None = None
) -> Callable[[Callable[[TrieFixture], None]], Check]:
    """Create a check from a function of a `TrieFixture`; `Check` describes the arguments."""
    return lambda function: Check(function, "trie", member=member)


# -- outcomes of a check -----------------------------------------------------------------


class CheckFailure(AssertionError):
    """A property was violated.

    Attributes:
        expected: Description of the required result.
        found: Description of the actual result.
        example: The values of the failing example, by name.
        diagnose: Function that returns a hint at the cause, or an empty string. It is called
            once, for the smallest example.
    """

    def __init__(
        self,
        expected: str,
        found: str,
        example: dict[str, Any],
        diagnose: Callable[[], str] = str,
    ) -> None:
        super().__init__(expected, found, example)
        self.expected = expected
        self.found = found
        self.example = example
        self.diagnose = diagnose

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
    """Raised by a check that needs something that the target lacks; the message names it."""


def expect(holds: bool, expected: str, found: object, **example: Any) -> None:
    """Raise `CheckFailure` unless a property holds.

    Args:
        holds: Whether the property holds.
        expected: Description of the required result.
        found: The actual result.
        **example: The values of the example.
    """
    if not holds:
        raise CheckFailure(expected, str(found), example)
