"""Weighted samples from a grammar (regular expression, JSON schema); short enough to copy.

xgrammar (`pip install xgrammar`) computes which tokens may follow. Sampling from these alone is
biased towards texts that begin likely and continue unlikely. The importance weight corrects
that: the product over all tokens of the model's probability of the allowed set. The mean
weight is an unbiased estimate of the probability that the model follows the grammar.
"""

import asyncio
import math
from collections import Counter

import numpy as np
import torch
import xgrammar

import genlm


def compiler(llm: genlm.AsyncLM) -> xgrammar.GrammarCompiler:
    """Compile grammars for the model's vocabulary, with the exact bytes."""
    tokens = [token.byte_string for token in llm.byte_vocab]
    stop = [llm.tokenizer.eos_token_id]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=stop))


async def constrained(
    llm: genlm.AsyncLM, grammar: xgrammar.CompiledGrammar, prompt: list[int], seed: int
) -> tuple[list[int], float]:
    """Draw one continuation, without the end-of-sequence token; also its log-weight."""
    rng, log_weight, drawn = np.random.default_rng(seed), 0.0, []
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, llm.vocab_size)
    while not matcher.is_terminated():
        row = (await llm.next_token_logprobs(prompt + drawn)).cpu()  # the caller's copy
        matcher.fill_next_token_bitmask(mask)
        xgrammar.apply_token_bitmask_inplace(row, mask[0])
        mass = torch.cumsum(row.double().exp(), 0)
        drawn.append(int(torch.searchsorted(mass, rng.random() * mass[-1:], right=True)))
        log_weight += float(mass[-1].log())
        matcher.accept_token(drawn[-1])
    return drawn[:-1], log_weight


async def _main() -> None:
    with genlm.load_model("demo", "hf") as llm:
        grammar = compiler(llm).compile_regex(" (Value|Type|Key|Index|Import|OS)Error")
        prompt = llm.encode("If the argument is wrong, this raises")
        asked = (constrained(llm, grammar, prompt, seed) for seed in range(100))
        drawn = await asyncio.gather(*asked)
        totals: Counter[str] = Counter()
        for token_ids, log_weight in drawn:
            totals[llm.decode(token_ids)] += math.exp(log_weight)
        evidence = totals.total()
        for text, total in totals.most_common():
            print(f"{total / evidence:.3f} {text}")
        print(f"log-evidence {math.log(evidence / len(drawn)):.3f}")


if __name__ == "__main__":
    asyncio.run(_main())
