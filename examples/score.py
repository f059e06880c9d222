"""Log-probabilities of whole texts, perplexity and mutual information, short enough to copy.

All prefixes of all texts are requested at once. `max_pending` bounds the number of rows in
memory: with 128,000 tokens a thousand rows are half a gibibyte.
"""

import asyncio
import math

import torch

import genlm


async def logprob(llm: genlm.AsyncLM, token_ids: list[int], context: list[int]) -> float:
    """Log-probability of tokens after a context of at least one token."""
    text = context + token_ids
    rows = await llm.batch_next_token_logprobs(
        [text[:end] for end in range(len(context), len(text))]
    )
    return float(rows.cpu().double().gather(1, torch.tensor(token_ids)[:, None]).sum())


def tokens(llm: genlm.AsyncLM, text: str) -> list[int]:
    """Without the beginning-of-text token that many tokenizers put before it."""
    return llm.encode(text, begin=False)


async def mutual_information(llm: genlm.AsyncLM, first: str, second: str) -> float:
    """Pointwise mutual information in nats: how much likelier `second` is after `first`."""
    start = [llm.tokenizer.bos_token_id]
    first_ids, second_ids = tokens(llm, first), tokens(llm, second)
    after, alone = await asyncio.gather(
        logprob(llm, second_ids, start + first_ids), logprob(llm, second_ids, start)
    )
    return after - alone


async def _main() -> None:
    with genlm.load_model("demo", "hf", max_pending=1000) as llm:
        texts = ["The function returns a list.", "A list the returns function."]
        encoded = [tokens(llm, text) for text in texts]
        start = [llm.tokenizer.bos_token_id]
        scores = await asyncio.gather(*(logprob(llm, ids, start) for ids in encoded))
        for text, ids, score in zip(texts, encoded, scores):
            print(f"{score:8.3f}  perplexity {math.exp(-score / len(ids)):7.1f}  {text}")
        for second in (" the call raises an exception.", " the sun is warm."):
            pmi = await mutual_information(llm, "If the argument is negative,", second)
            print(f"{pmi:8.3f}  {second!r}")


if __name__ == "__main__":
    asyncio.run(_main())
