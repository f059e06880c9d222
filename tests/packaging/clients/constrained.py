"""Constrained sequential Monte Carlo with every token sampler of genlm-control.

The constraint allows so few texts that all their spellings can be summed by hand.
"""

import asyncio
import json
import math

import numpy as np
import torch
from genlm.control import (
    AWRS,
    SMC,
    BoolFSA,
    PromptedLLM,
    direct_token_sampler,
    eager_token_sampler,
    topk_token_sampler,
)
from scored import ENDS, PROMPT, llm, logprob, spellings

import genlm

TEXTS = [b" type", b" value", b" values", b" key", b" which"]

fsa = BoolFSA.from_regex(r" (type|values?|key|which)")
coerced = fsa.coerce(llm, f=b"".join)
new = PromptedLLM(genlm.load_model("demo", backend="hf"), eos_byte_strings=ENDS)
new.set_prompt_from_str(PROMPT)
SAMPLERS = {
    "direct": lambda: direct_token_sampler(llm * coerced),
    "awrs": lambda: AWRS(llm, coerced),
    "eager": lambda: eager_token_sampler(llm, fsa),
    "topk": lambda: topk_token_sampler(llm, fsa, K=10),
    "direct, on a model of the new interface": lambda: direct_token_sampler(
        new * fsa.coerce(new, f=b"".join)
    ),
}


async def main():
    found = {}
    for name, make in SAMPLERS.items():
        torch.manual_seed(0)
        np.random.seed(0)
        sampler = make()
        particles = await SMC(sampler)(n_particles=1600, ess_threshold=0.5, max_tokens=10)
        texts = [b"".join(t for t in c if isinstance(t, bytes)) for c in particles.contexts]
        found[name] = {
            "log_evidence": float(particles.log_ml),
            "texts": sorted({text.decode() for text in texts}),
        }
        await sampler.cleanup()
    print(json.dumps(found))


every = [ids for text in TEXTS for ids in spellings(text)]
exact = np.logaddexp.reduce([logprob(ids, ends=True) for ids in every])

# genlm-control's own scores, of what the oracle scored above.
for ids in every:
    context = [llm.token_maps.decode[i] for i in ids]
    for asked, ends in ((llm.prefix, False), (llm.complete, True)):
        scored = asyncio.run(asked(context))
        assert math.isclose(scored, logprob(ids, ends=ends), abs_tol=1e-4 * len(ids)), ids

print(json.dumps({"exact": float(exact), "spellings": len(every)}))
asyncio.run(main())
