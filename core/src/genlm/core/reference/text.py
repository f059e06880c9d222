"""Training text: where it comes from and how it is cut into documents."""

from __future__ import annotations

import re
from importlib import resources

__all__ = ["default_text", "split_documents"]

_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")


def split_documents(text: str | bytes) -> list[bytes]:
    """Cut a text into its paragraphs: blank lines end a document.

    Line ends within a paragraph stay; white space around paragraphs goes.

    Returns:
        The documents in their order as UTF-8 bytes, none of them empty.
    """
    data = text.encode() if isinstance(text, str) else text
    paragraphs = (paragraph.strip() for paragraph in _BLANK_LINES.split(data))
    return [paragraph for paragraph in paragraphs if paragraph]


def default_text() -> bytes:
    """Read the text that ships with the engine, one paragraph a line."""
    return resources.files(__package__).joinpath("default.txt").read_bytes()
