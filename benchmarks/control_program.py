"""A genlm-control program, measured in a separate interpreter for `bench_backend.py`.

The same lines run on the published genlm-backend and on this project's. Reads a case per
line, `SAMPLER PARTICLES PROMPT STEPS as-is|tuned`, and prints the milliseconds of a step.
`tuned` is what the published documentation advises: a batch size of the particles' number,
and the prompt in the cache of keys and values.
"""

from __future__ import annotations

import asyncio
import sys
import time
import warnings

import numpy as np
import torch
from genlm.control import SMC, BoolFSA, PromptedLLM, direct_token_sampler, eager_token_sampler
from particle_model import VOCAB_SIZE, llama, prompt_of, tokenizer

from genlm.backend.llm import AsyncTransformer

warnings.simplefilter("ignore")

# Few tokens of the vocabulary are letters alone; a set sampler finds them in the trie.
LETTERS = BoolFSA.from_regex(r"[a-z]{11}[a-z]*")


def sampler_of(name: str, llm: PromptedLLM):
    if name == "direct":
        return direct_token_sampler(llm)
    return eager_token_sampler(llm, LETTERS)


async def milliseconds_a_step(
    name: str, hf_model: object, particles: int, prompt: int, steps: int, *, tuned: bool
) -> float:
    np.random.seed(0)
    torch.manual_seed(0)
    options = {"batch_size": particles} if tuned else {}
    hf_tokenizer = tokenizer()
    hf_tokenizer.eos_token = hf_tokenizer.convert_ids_to_tokens(0)
    model = AsyncTransformer(hf_model, hf_tokenizer, **options)
    llm = PromptedLLM(model, prompt_ids=prompt_of(prompt))
    sampler = sampler_of(name, llm)
    await sampler.sample([])  # what is made on first use
    model.clear_cache()
    if tuned:
        model.cache_kv(prompt_of(prompt))
    start = time.perf_counter()
    await SMC(sampler)(n_particles=particles, ess_threshold=0.5, max_tokens=steps)
    seconds = time.perf_counter() - start
    await sampler.cleanup()
    return seconds / steps * 1e3


def main() -> None:
    hf_model = llama()
    assert hf_model.config.vocab_size == VOCAB_SIZE
    for line in sys.stdin:
        name, particles, prompt, steps, mode = line.split()
        sizes = (int(particles), int(prompt), int(steps))
        figure = asyncio.run(milliseconds_a_step(name, hf_model, *sizes, tuned=mode == "tuned"))
        print(figure, flush=True)


if __name__ == "__main__":
    main()
