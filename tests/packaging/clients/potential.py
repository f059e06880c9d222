"""The potential of `examples/scored_potential.py` against sums of unbatched rows."""

import asyncio
import json
import math

import torch
from genlm.control import PromptedLLM
from scored import ENDS, PROMPT, TOKENS, logprob, model
from scored_potential import ScoredLLM

import genlm

TEXT = " the class method returns a new list of the items in the first"


async def main():
    rows = []
    request = genlm.AsyncLM.batch_next_token_logprobs

    async def counted(self, token_ids_list, *arguments, **options):
        rows.append(len(token_ids_list))
        return await request(self, token_ids_list, *arguments, **options)

    genlm.AsyncLM.batch_next_token_logprobs = counted
    llm = ScoredLLM(model, eos_byte_strings=ENDS)
    llm.set_prompt_from_str(PROMPT)
    ids = model.tokenizer.encode(TEXT)
    ids = [token_id for token_id in ids if token_id not in llm.token_maps.eos_idxs]
    context = [TOKENS[token_id] for token_id in ids]
    found = [await llm.prefix(context), await llm.complete(context), await llm.complete([])]
    assert not rows
    genlm.AsyncLM.batch_next_token_logprobs = request
    exact = [logprob(ids, ends=False), logprob(ids, ends=True), logprob([], ends=True)]
    for value, expected in zip(found, exact, strict=True):
        assert math.isclose(value, expected, abs_tol=1e-3), (found, exact)
    warm = ScoredLLM(model, eos_byte_strings=ENDS, temperature=0.5)
    plain = PromptedLLM(model, eos_byte_strings=ENDS, temperature=0.5)
    plain.set_prompt_from_str(PROMPT)
    warm.set_prompt_from_str(PROMPT)
    assert math.isclose(await warm.prefix(context), await plain.prefix(context), abs_tol=1e-4)
    print(json.dumps({"tokens": len(context), "exact": exact}))


torch.manual_seed(0)
asyncio.run(main())
