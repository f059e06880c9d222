"""Next-byte probabilities of a token model, summed over tokenizations; short enough to copy.

Many token sequences spell the same text, and a text may end within a token. A beam of
hypotheses advances byte by byte; each has its complete tokens, their row, and the token-trie
node of the bytes of a partial token. The probabilities are exact until the beam is full.
"""

import asyncio
import heapq
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

import genlm

STOP = 256
"""Index after the 256 bytes: the end of the text."""


@dataclass(frozen=True)
class Hypothesis:
    """A tokenization of the bytes read: complete tokens and a part of the next one."""

    token_ids: tuple[int, ...]
    weight: float  # of the complete tokens, normalised over the beam
    mass: float  # including the part of the next token
    node: int  # trie node of this part
    row: np.ndarray | None  # probabilities of the next token, once they are needed


class ByteReader:
    """Next-byte probabilities of a token model, after the bytes that were read.

    Args:
        llm: The model.
        width: Size of the beam; the most likely hypotheses are kept.
    """

    def __init__(self, llm: genlm.AsyncLM, width: int) -> None:
        self.llm, self.width = llm, width
        vocabulary: list = list(llm.byte_vocab)
        vocabulary[llm.tokenizer.eos_token_id] = (STOP,)  # one symbol, not "<|endoftext|>"
        self.trie = genlm.get_trie()(vocabulary)

    async def start(self, token_ids: list[int]) -> None:
        """Begin after these tokens, such as the beginning of a text."""
        self.logprob = 0.0  # of all bytes read
        await self._keep([Hypothesis(tuple(token_ids), 1.0, 1.0, self.trie.root, None)])

    def probabilities(self) -> np.ndarray:
        """The distribution over 256 bytes and `STOP`, shape `(257,)`."""
        mass = np.zeros(257)
        for hypothesis in self._beam:
            below = self.trie.child_prefixes(hypothesis.node)
            sums = self.trie.partial_sum(hypothesis.row, below)
            mass[self.trie.child_symbols(hypothesis.node)] += hypothesis.weight * sums
        return mass / mass.sum()

    async def read(self, text: bytes) -> None:
        """Advance by these bytes."""
        for byte in text:
            self.logprob += float(np.log(self.probabilities()[byte]))
            beam = []
            for hypothesis in self._beam:
                node = self.trie.child(hypothesis.node, byte)
                if node is not None:
                    beam += self._at(node, hypothesis)
            await self._keep(beam)

    def _at(self, node: int, hypothesis: Hypothesis) -> list[Hypothesis]:
        """Advance to a node: within the partial token, and by each token that ends there."""
        begun = self.trie.partial_sum(hypothesis.row, self.trie.child_prefixes(node)).sum()
        beam = [replace(hypothesis, node=node, mass=hypothesis.weight * begun)]
        for token in self.trie.tokens_at(node):
            weight = hypothesis.weight * hypothesis.row[token]
            ids = (*hypothesis.token_ids, int(token))
            beam.append(Hypothesis(ids, weight, weight, self.trie.root, None))
        return beam

    async def _keep(self, beam: list[Hypothesis]) -> None:
        kept = heapq.nlargest(self.width, beam, key=attrgetter("mass"))
        total = sum(hypothesis.mass for hypothesis in kept)
        self._beam = await asyncio.gather(*(self._row(w, total) for w in kept if w.mass > 0))

    async def _row(self, hypothesis: Hypothesis, total: float) -> Hypothesis:
        row = hypothesis.row
        if row is None:
            logprobs = await self.llm.next_token_logprobs(hypothesis.token_ids)
            row = logprobs.cpu().double().exp().numpy()
        return replace(
            hypothesis, row=row, weight=hypothesis.weight / total, mass=hypothesis.mass / total
        )


async def _main() -> None:
    with genlm.load_model("demo", "hf") as llm:
        reader, begin = ByteReader(llm, width=32), [llm.tokenizer.bos_token_id]
        for text in ("The followi", "The following "):
            token_ids = llm.encode(text, begin=False)
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
