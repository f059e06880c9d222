"""Prompts that end anywhere: the next byte, summed over tokenizations; short enough to copy.

A prompt that ends in a space or within a word has a last token after which the model was
trained on other texts. `genlm.ByteReader` reads the prompt byte by byte and sums over all token
sequences that spell it. `sampled` draws a continuation byte by byte.
"""

import asyncio

import numpy as np

import genlm

STOP = genlm.ByteReader.STOP


async def sampled(reader: genlm.ByteReader, size: int, seed: int) -> bytes:
    """Draw at most this many bytes; the reader is not changed."""
    reader, rng, text = reader.copy(), np.random.default_rng(seed), b""
    while len(text) < size:
        byte = int(rng.choice(STOP + 1, p=reader.probabilities()))
        if byte == STOP:
            break
        text += bytes([byte])
        await reader.read(text[-1:])
    return text


def likeliest(reader: genlm.ByteReader) -> str:
    """Five bytes with their probabilities."""
    row = reader.probabilities()
    return "  ".join(f"{chr(byte)!r} {row[byte]:.3f}" for byte in np.argsort(-row[:STOP])[:5])


async def _main() -> None:
    with genlm.load_model("demo", "hf") as llm:
        reader = genlm.ByteReader(llm, width=32)
        begin = llm.encode("") or [llm.vocabulary.eos_token_id]  # Qwen's tokenizers add nothing
        for text in ("The followi", "The following "):
            token_ids = llm.encode(text, begin=False)
            await reader.start(begin + token_ids)
            print(f"{text!r} as its tokenizer writes it: {likeliest(reader)}")
            await reader.start(begin)
            await reader.read(text.encode())
            print(f"{text!r} however it is written: {likeliest(reader)}")
            drawn = await sampled(reader, 30, seed=1)
            print(f"{text!r} continued: {drawn.decode(errors='replace')!r}")


if __name__ == "__main__":
    asyncio.run(_main())
