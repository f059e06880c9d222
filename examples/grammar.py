"""Weighted samples from a grammar (regular expression, JSON schema); short enough to copy.

xgrammar (`pip install xgrammar`) computes which tokens may follow. Sampling from these alone is
biased towards texts that begin likely and continue unlikely. The importance weight corrects
that: the product over all tokens of the model's probability of the allowed set. The mean
weight is an unbiased estimate of the probability that the model follows the grammar.
"""

import asyncio
import math
from collections import Counter

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
