"""A product or mixture of two models with different tokenizers, over bytes.

`genlm.ByteReader` sums over tokenizations. Texts are drawn from the normalised product of the
models' probabilities, or from their mixture, whose weights are all equal. arXiv 2603.05432.
"""

import asyncio
import sys

import numpy as np

import genlm
from genlm.smc import resampled


async def extended(text, readers, combine, uniform):
    """Draw the next byte in proportion to a combination; also the log of their sum."""
    if not readers:
        return (text, []), 0.0  # the text is over
    after = [reader.logprob + np.log(reader.probabilities() + 1e-300) for reader in readers]
    mass = np.exp(combine(*after) - combine(*(reader.logprob for reader in readers))).cumsum()
    byte = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    if byte == genlm.ByteReader.STOP:
        return (text, []), np.log(mass[-1])
    readers = [reader.copy() for reader in readers]
    await asyncio.gather(*(reader.read(bytes([byte])) for reader in readers))
    return (text + bytes([byte]), readers), np.log(mass[-1])


async def ensemble(models, prompt, size, *, combine=np.add, max_bytes, seed=0):
    """Continue a prompt; `combine` is np.add for the product, np.logaddexp for the mixture."""
    rng, log_weights = np.random.default_rng(seed), np.zeros(size)
    for reader in (readers := [genlm.ByteReader(llm) for llm in models]):
        await reader.start(reader.llm.encode("") or [reader.llm.vocabulary.eos_token_id])
        await reader.read(prompt)
    particles = [(b"", readers)] * size
    for _ in range(max_bytes):
        ancestors, log_weights = resampled(log_weights, rng.random())
        drawn = zip(ancestors, rng.random(size))
        steps = [extended(*particles[i], combine, uniform) for i, uniform in drawn]
        particles, gains = zip(*await asyncio.gather(*steps))
        log_weights = log_weights + np.array(gains)
    return [text for text, _ in particles], log_weights


if __name__ == "__main__":
    models = genlm.load_model(*sys.argv[1:] or ["demo"]), genlm.load_model("demo", "reference")
    with models[0], models[1]:
        for particle in zip(*asyncio.run(ensemble(models, b"The function ", 8, max_bytes=16))):
            print(*particle)
