"""Documents the blocking methods `x_sync = blocking(x)` in the reference of the web site.

A griffe extension. mkdocstrings reads the sources without running them, so it treats a blocking
method as an attribute without a docstring and omits it. This adds the summary of its coroutine.
"""

from __future__ import annotations

from typing import Any

import griffe


class BlockingTwins(griffe.Extension):
    """Gives each attribute that `blocking` or `blocking_as` makes a docstring."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Find the twins among the members of a class."""
        for member in cls.members.values():
            method = _coroutine_of(member)
            if method is None or member.docstring is not None:
                continue
            coroutine = cls.members.get(method)
            lines = [f"The blocking form of `{method}`, with its arguments and result."]
            if coroutine is not None and coroutine.docstring is not None:
                lines.insert(0, coroutine.docstring.value.partition("\n\n")[0])
            member.docstring = griffe.Docstring(" ".join(lines), parent=member)


def _coroutine_of(member: Any) -> str | None:
    """Return the name of the method of which a member is the twin, None if it is no twin."""
    value = getattr(member, "value", None) if member.is_attribute else None
    if isinstance(value, griffe.ExprCall) and str(value.function) in {
        "blocking",
        "blocking_as",
    }:
        return str(value.arguments[-1])
    return None
