"""`Check`: a law, the function that tries to break it, and what it needs to run.

A check is a plain function of a trial, made a `Check` by `engine_check` or
`trie_check`. The first sentence of its docstring is the law.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genlm import Capability
from genlm.testing.target import Kind

if TYPE_CHECKING:
    from genlm.testing.engine_trial import EngineTrial
    from genlm.testing.trie_trial import TrieTrial

__all__ = ["Check", "engine_check", "trie_check"]

_SENTENCE_END = re.compile(r"(?<=\.)\s")


@dataclass(frozen=True)
class Check:
    """One law about engines or tries and the function that tries to break it.

    Attributes:
        function: Takes a trial; raises where the law is broken.
        kind: What it is about.
        needs: A capability without which it does not apply.
        unless: A capability with which it does not apply.
        member: A member without which it does not apply to a trie.
        oracle: Whether it means nothing without an oracle independent of the engine.
        cases: What must have occurred during the check for it to mean anything; the
            function reports each with `trial.saw`. It fails if one never occurred.
    """

    function: Callable[[Any], None]
    kind: Kind
    needs: Capability | None = None
    unless: Capability | None = None
    oracle: bool = False
    cases: tuple[str, ...] = field(default=())
    member: str | None = None

    @property
    def id(self) -> str:
        """The function's name, with hyphens."""
        return self.function.__name__.replace("_", "-")

    @property
    def law(self) -> str:
        """What it guards: the first sentence of the function's docstring."""
        text = " ".join((inspect.getdoc(self.function) or "").split())
        return _SENTENCE_END.split(text, maxsplit=1)[0]


def engine_check(
    *,
    needs: Capability | None = None,
    unless: Capability | None = None,
    oracle: bool = False,
    cases: tuple[str, ...] = (),
) -> Callable[[Callable[[EngineTrial], None]], Check]:
    """Make a function of an `EngineTrial` a check; see `Check` for the arguments."""

    def decorate(function: Callable[[EngineTrial], None]) -> Check:
        return Check(function, "engine", needs, unless, oracle, cases)

    return decorate


def trie_check(
    *, member: str | None = None, cases: tuple[str, ...] = ()
) -> Callable[[Callable[[TrieTrial], None]], Check]:
    """Make a function of a `TrieTrial` a check; see `Check` for the arguments."""

    def decorate(function: Callable[[TrieTrial], None]) -> Check:
        return Check(function, "trie", cases=cases, member=member)

    return decorate
