"""The byte alphabet of byte-level BPE: one printable character for each byte.

Published with GPT-2 (`bytes_to_unicode`) and kept by every byte-level BPE since:
printable Latin-1 characters stand for themselves, the 68 other bytes for the
characters from U+0100 on, in order.
"""

from __future__ import annotations

__all__ = ["bytes_from_characters"]

_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


def _translation() -> dict[int, int]:
    """Map each character of the alphabet to the character whose code is its byte.

    Latin-1 characters outside the alphabet map to U+FFFF, which Latin-1 cannot
    encode, so that they are refused rather than taken for bytes.
    """
    printable = {byte for part in _PRINTABLE for byte in part}
    others = [byte for byte in range(256) if byte not in printable]
    table = dict.fromkeys(others, 0xFFFF)
    table.update({0x100 + position: byte for position, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _translation()


def bytes_from_characters(characters: str) -> bytes | None:
    """The bytes that a byte-level token spells, None if a character is no byte's."""
    try:
        return characters.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return None
