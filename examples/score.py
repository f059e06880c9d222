"""Log-probabilities of whole texts, perplexity and mutual information, short enough to copy.

A score is the log-probability of each token of a text after those before it; no row leaves the
engine. The scores of all texts are requested at once.
"""

import asyncio
import math

import genlm


async def logprob(llm: genlm.AsyncLM, token_ids: list[int], context: list[int]) -> float:
    """Log-probability of tokens after a context of at least one token."""
    scores = await llm.score(context + token_ids, start=len(context))
    return float(scores.double().sum())


def tokens(llm: genlm.AsyncLM, text: str) -> list[int]:
    """Without the beginning-of-text token that many tokenizers put before it."""
    return llm.encode(text, begin=False)


def beginning(llm: genlm.AsyncLM) -> list[int]:
    """What begins a text; where the tokenizer names nothing (Qwen), the end of another text."""
    return llm.encode("") or [llm.vocabulary.eos_token_id]


async def mutual_information(llm: genlm.AsyncLM, first: str, second: str) -> float:
    """Pointwise mutual information in nats: how much likelier `second` is after `first`."""
    start = beginning(llm)
    first_ids, second_ids = tokens(llm, first), tokens(llm, second)
    after, alone = await asyncio.gather(
        logprob(llm, second_ids, start + first_ids), logprob(llm, second_ids, start)
    )
    return after - alone


async def _main() -> None:
    with genlm.load_model("demo", "hf") as llm:
        texts = ["The function returns a list.", "A list the returns function."]
        encoded = [tokens(llm, text) for text in texts]
        start = beginning(llm)
        scores = await asyncio.gather(*(logprob(llm, ids, start) for ids in encoded))
        for text, ids, score in zip(texts, encoded, scores):
            print(f"{score:8.3f}  perplexity {math.exp(-score / len(ids)):7.1f}  {text}")
        for second in (" the call raises an exception.", " the sun is warm."):
            pmi = await mutual_information(llm, "If the argument is negative,", second)
            print(f"{pmi:8.3f}  {second!r}")


if __name__ == "__main__":
    asyncio.run(_main())
