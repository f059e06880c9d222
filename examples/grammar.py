"""Weighted samples from a grammar (regular expression, JSON schema), one context at a time.

Samples from the masks of xgrammar are biased towards texts that begin likely and continue
unlikely. The weight, the product of the probabilities of the allowed sets, corrects that. The
masks of xgrammar 0.2 lack some tokens, such as "rror"; those of `genlm.constraints` do not.
"""

import asyncio
import math
import sys
from collections import Counter

import xgrammar

import genlm


def compiler(llm):
    """Return a compiler of grammars for the model's vocabulary, with the exact bytes."""
    tokens, stop = [token.byte_string for token in llm.byte_vocab], llm.vocabulary.eos_token_id
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=[stop]))


async def constrained(llm, grammar, prompt, seed):
    """Draw one continuation, without the end-of-sequence token; also its log-weight."""
    context, log_weight = llm.context(prompt), 0.0
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, llm.vocab_size)
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        drawn = await context.draw(mask, seed=seed)
        log_weight += drawn.log_mass
        matcher.accept_token(drawn.token_id)
        context = context.extend(drawn.token_id)
    return list(context.token_ids[len(prompt) : -1]), log_weight


async def _main(llm, size=100):
    grammar = compiler(llm).compile_regex(" (Value|Type|Key|Index|Import|OS)Error")
    prompt, totals = llm.encode("If the argument is wrong, this raises"), Counter()
    draws = (constrained(llm, grammar, prompt, seed) for seed in range(size))
    for token_ids, log_weight in await asyncio.gather(*draws):
        totals[llm.decode(token_ids)] += math.exp(log_weight) / size
    print(*totals.most_common(), sep="\n")
    print(f"log-evidence {math.log(totals.total()):.3f}")


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        asyncio.run(_main(llm))
