"""Prompts that end anywhere: the next byte, summed over tokenizations.

If a prompt ends in a space or within a word, its last token differs from those of the training
texts, in which the next letters are part of the same token. `genlm.ByteReader` reads the prompt
byte by byte and sums over all token sequences that spell it. `sampled` draws a continuation
byte by byte.
"""

import asyncio
import sys

import numpy as np

import genlm


async def sampled(reader, size, seed):
    """Draw at most this many bytes; the reader is not changed."""
    reader, rng, text = reader.copy(), np.random.default_rng(seed), b""
    while len(text) < size:
        byte = int(rng.choice(reader.STOP + 1, p=reader.probabilities()))
        if byte == reader.STOP:
            break
        text += bytes([byte])
        await reader.read(text[-1:])
    return text


def likeliest(reader):
    """Return five bytes with their probabilities."""
    row = reader.probabilities()
    return "  ".join(f"{chr(byte)!r} {row[byte]:.3f}" for byte in np.argsort(-row[:256])[:5])


async def _main(llm):
    reader = genlm.ByteReader(llm, width=32)
    begin = llm.encode("") or [llm.vocabulary.eos_token_id]  # Qwen's tokenizers add nothing
    for text in ("The followi", "The following "):
        await reader.start(begin + llm.encode(text, begin=False))
        print(f"{text!r} as its tokenizer writes it: {likeliest(reader)}")
        await reader.start(begin)
        await reader.read(text.encode())
        print(f"{text!r} however it is written: {likeliest(reader)}")
        drawn = await sampled(reader, 30, seed=1)
        print(f"{text!r} continued: {drawn.decode(errors='replace')!r}")


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        asyncio.run(_main(llm))
