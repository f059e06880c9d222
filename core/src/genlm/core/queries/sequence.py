"""`TokenSequence`: immutable token ids that are extended in constant time.

A sequence is stored as full blocks, which all its extensions share, and a tail of at most one
block. Each block has a digest of all ids up to its end, so the key of a sequence is that
digest and the ids of the tail: equal for equal ids, and of bounded size.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

BLOCK_TOKENS = 128
"""Number of ids in a full block. Extending a sequence copies its tail, 4 bytes per id."""

_BLOCK_BYTES = 4 * BLOCK_TOKENS

_DIGEST_BYTES = 17
"""136 bits. Not a multiple of 4, so the key of a short sequence, which is its packed ids, never
equals that of a long one."""

_SECRET = os.urandom(32)
"""Key of the digests: nobody can construct sequences with equal digests."""


class _Block:
    """`BLOCK_TOKENS` packed ids, and the digest of all ids up to their end."""

    __slots__ = ("data", "digest", "previous")

    previous: _Block | None
    data: bytes
    digest: bytes

    def __init__(self, previous: _Block | None, data: bytes) -> None:
        self.previous = previous
        self.data = data
        prefix = b"" if previous is None else previous.digest
        self.digest = blake2b(prefix + data, digest_size=_DIGEST_BYTES, key=_SECRET).digest()


class TokenSequence:
    """Immutable token ids, at least one.

    Sequences of equal ids are equal.

    Args:
        packed: The ids, oldest first, 32 bits each.
        extends: The sequence that the ids extend; None if they are a whole sequence.

    Attributes:
        key: Equal if and only if the ids are equal; at most 529 bytes. For up to 128 ids, the
            key is the packed ids; for more, a digest of 136 bits replaces the full blocks. The
            digests differ between processes.
    """

    __slots__ = ("_block", "_length", "_tail", "key")

    _block: _Block | None
    _tail: bytes
    _length: int
    key: bytes

    def __init__(self, packed: bytes, extends: TokenSequence | None = None) -> None:
        if extends is None:
            block, tail, length = None, packed, 0
        else:
            block, tail, length = extends._parts  # noqa: SLF001 - of the same class
            tail += packed
        if len(tail) > _BLOCK_BYTES:  # the tail keeps at least one id
            full = (len(tail) - 1) // _BLOCK_BYTES * _BLOCK_BYTES
            for begin in range(0, full, _BLOCK_BYTES):
                block = _Block(block, tail[begin : begin + _BLOCK_BYTES])
            tail = tail[full:]
        self._block = block
        self._tail = tail
        self._length = length + len(packed) // 4
        self.key = tail if block is None else block.digest + tail

    @property
    def _parts(self) -> tuple[_Block | None, bytes, int]:
        return self._block, self._tail, self._length

    @classmethod
    def of(
        cls, token_ids: Sequence[int], extends: TokenSequence | None = None
    ) -> TokenSequence:
        """Return a sequence of ids from 0 to 2**32 - 1; at least one."""
        return cls(array("I", token_ids).tobytes(), extends)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSequence) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        last = ", ".join(map(str, self.ids_from(max(0, self._length - 8))))
        return f"<{type(self).__name__} of {self._length} ids, the last of which are {last}>"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids, assembled in time proportional to their number."""
        return self.ids_from(0)

    def ids_from(self, start: int) -> tuple[int, ...]:
        """Return the ids from position `start` on, in time proportional to their number."""
        parts, block, data = [], self._block, self._tail
        first = self._length - len(data) // 4
        while first > start:
            assert block is not None  # noqa: S101 - a defect of this module
            parts.append(data)
            data, block = block.data, block.previous
            first -= BLOCK_TOKENS
        parts.append(data[4 * (start - first) :])
        parts.reverse()
        return tuple(array("I", b"".join(parts)))

    def prefix_key(self, length: int) -> bytes:
        """Return the key of the first `length` ids; fast if few ids follow them.

        Args:
            length: From 0 to the length of the sequence.
        """
        block, tail = self._prefix_parts(length)
        return tail if block is None else block.digest + tail

    def prefix(self, length: int) -> TokenSequence:
        """Return the first `length` ids, which share their blocks with this sequence."""
        sequence = object.__new__(TokenSequence)
        block, tail = sequence._block, sequence._tail = self._prefix_parts(length)
        sequence._length = length
        sequence.key = tail if block is None else block.digest + tail
        return sequence

    def _prefix_parts(self, length: int) -> tuple[_Block | None, bytes]:
        block, tail = self._block, self._tail
        first = self._length - len(tail) // 4
        while first and first >= length:
            assert block is not None  # noqa: S101 - a defect of this module
            tail, block = block.data, block.previous
            first -= BLOCK_TOKENS
        return block, tail[: 4 * (length - first)]


class PackedSequences(NamedTuple):
    """Sequences for transfer to other processes; shared blocks are stored once.

    Attributes:
        blocks: Index of the preceding block, -1 for none, and packed ids of every block.
        tails: Index of the last block, -1 for none, and packed tail of every sequence.
    """

    blocks: list[tuple[int, bytes]]
    tails: list[tuple[int, bytes]]

    def unpack(self) -> list[TokenSequence]:
        """Return the sequences."""
        blocks: list[_Block] = []
        lengths: list[int] = []
        for previous, data in self.blocks:
            lengths.append(BLOCK_TOKENS + (lengths[previous] if previous >= 0 else 0))
            blocks.append(_Block(blocks[previous] if previous >= 0 else None, data))
        sequences = []
        for place, tail in self.tails:
            sequence = TokenSequence(tail)
            if place >= 0:
                block = blocks[place]
                sequence._block, sequence._length = block, sequence._length + lengths[place]  # noqa: SLF001 - a part of this module
                sequence.key = block.digest + tail
            sequences.append(sequence)
        return sequences


def pack_sequences(sequences: Iterable[TokenSequence]) -> PackedSequences:
    """Pack sequences; blocks that several sequences share are packed once."""
    packed = PackedSequences([], [])
    places: dict[int, int] = {}  # by `id` of the block; the sequences keep the blocks alive
    for sequence in sequences:
        last, tail, _ = sequence._parts  # noqa: SLF001 - a part of this module
        new_blocks, block = [], last
        while block is not None and id(block) not in places:
            new_blocks.append(block)
            block = block.previous
        place = -1 if block is None else places[id(block)]
        for block in reversed(new_blocks):
            packed.blocks.append((place, block.data))
            place = places[id(block)] = len(packed.blocks) - 1
        packed.tails.append((place, tail))
    return packed
