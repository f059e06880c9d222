"""Probabilities of the next byte, whatever the tokens, short enough to copy.

A text is written by many sequences of tokens, and where it ends a token may just have
begun. A beam of these ways to write it goes forward byte by byte: a way is its complete
tokens, their row, and a node of the token trie, the bytes of the token begun. Nothing is
approximated until the beam is full, and a text may end anywhere, also within a token.
"""

import asyncio
import heapq
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

import genlm

STOP = 256
"""Stands behind the 256 bytes: the text is over."""


@dataclass(frozen=True)
class Way:
    """One way to write the bytes read: complete tokens and a part of the next."""

    token_ids: tuple[int, ...]
    weight: float  # of the complete tokens, among all ways
    mass: float  # of the part of the next token too
    node: int  # of the trie: this part
    row: np.ndarray | None  # probabilities of the next token, once they are needed


class ByteReader:
    """Next-byte probabilities of a token model, after the bytes that were read.

    Args:
        llm: The model.
        width: The most ways kept; the likeliest stay.
    """

    def __init__(self, llm: genlm.AsyncLM, width: int) -> None:
        self.llm, self.width = llm, width
        vocabulary: list = list(llm.byte_vocab)
        vocabulary[llm.tokenizer.eos_token_id] = (STOP,)  # one symbol, not "<|endoftext|>"
        self.trie = genlm.get_trie()(vocabulary)

    async def start(self, token_ids: list[int]) -> None:
        """Begin after these tokens, such as the beginning of a text."""
        self.logprob = 0.0  # of all bytes read
        await self._keep([Way(tuple(token_ids), 1.0, 1.0, self.trie.root, None)])

    def probabilities(self) -> np.ndarray:
        """The distribution over 256 bytes and `STOP`, shape `(257,)`."""
        mass = np.zeros(257)
        for way in self._ways:
            below = self.trie.child_prefixes(way.node)
            sums = self.trie.partial_sum(way.row, below)
            mass[self.trie.child_symbols(way.node)] += way.weight * sums
        return mass / mass.sum()

    async def read(self, text: bytes) -> None:
        """Go on by these bytes."""
        for byte in text:
            self.logprob += float(np.log(self.probabilities()[byte]))
            ways = []
            for way in self._ways:
                node = self.trie.child(way.node, byte)
                if node is not None:
                    ways += self._at(node, way)
            await self._keep(ways)

    def _at(self, node: int, way: Way) -> list[Way]:
        """Go on to a node: within the token begun, and by each token that is complete there."""
        begun = self.trie.partial_sum(way.row, self.trie.child_prefixes(node)).sum()
        ways = [replace(way, node=node, mass=way.weight * begun)]
        for token in self.trie.tokens_at(node):
            weight = way.weight * way.row[token]
            ids = (*way.token_ids, int(token))
            ways.append(Way(ids, weight, weight, self.trie.root, None))
        return ways

    async def _keep(self, ways: list[Way]) -> None:
        kept = heapq.nlargest(self.width, ways, key=attrgetter("mass"))
        total = sum(way.mass for way in kept)
        self._ways = await asyncio.gather(*(self._row(w, total) for w in kept if w.mass > 0))

    async def _row(self, way: Way, total: float) -> Way:
        row = way.row
        if row is None:
            logprobs = await self.llm.next_token_logprobs(way.token_ids)
            row = logprobs.cpu().double().exp().numpy()
        return replace(way, row=row, weight=way.weight / total, mass=way.mass / total)


async def _main() -> None:
    with genlm.load_model("demo", "hf") as llm:
        reader, begin = ByteReader(llm, width=32), [llm.tokenizer.bos_token_id]
        for text in ("The followi", "The following "):
            token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
            await reader.start(begin + token_ids)
            print(f"{text!r} as its tokenizer writes it: {likeliest(reader)}")
            await reader.start(begin)
            await reader.read(text.encode())
            print(f"{text!r} however it is written: {likeliest(reader)}")


def likeliest(reader: ByteReader) -> str:
    """Five bytes with their probabilities."""
    row = reader.probabilities()
    return "  ".join(f"{chr(byte)!r} {row[byte]:.3f}" for byte in np.argsort(-row[:STOP])[:5])


if __name__ == "__main__":
    asyncio.run(_main())
