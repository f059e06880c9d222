"""Set samplers of genlm-control over the token trie: weights of sets and of all tokens."""

import asyncio
import json

import numpy as np
from genlm.control import BoolFSA
from genlm.control.sampler import EagerSetSampler, TopKSetSampler
from scored import END_IDS, TOKENS, llm, row

from genlm.backend.trie import TokenCharacterTrie

fsa = BoolFSA.from_regex(r" (t|a)[a-z]*( [a-z]*)?")


async def main():
    own = row(llm.prompt_ids)
    trie = TokenCharacterTrie(TOKENS)
    sums = trie.weight_sum(own.exp().numpy())
    tops = trie.weight_max(own.numpy())
    for node in range(0, len(trie), 7):
        prefix = bytes(trie.node2prefix[node])
        below = [t.token_id for t in TOKENS if t.byte_string.startswith(prefix)]
        if node >= len(TOKENS):  # a prefix, not a token
            assert np.isclose(sums[node], own[below].exp().sum().item(), atol=1e-6)
            assert np.isclose(tops[node], own[below].max().item(), atol=1e-6)

    found = {}
    target = llm * fsa.coerce(llm, f=b"".join)
    weights = (await target.logw_next([])).weights
    for name, sampler in {
        "all": TopKSetSampler(llm, fsa, K=None),
        "topk": TopKSetSampler(llm, fsa, K=5),
        "eager": EagerSetSampler(llm, fsa),
    }.items():
        np.random.seed(0)
        logws, _ = await sampler.sample_set([])
        kept = {
            token: float(logws[token])
            for token in target.vocab
            if np.isfinite(float(logws[token]))
        }
        for token, weight in kept.items():
            exact = float(own[token.token_id])
            # A set's weight is the token's divided by the probability that it is in the set.
            assert weight >= exact - 1e-4, (name, token)
            if name == "all":
                assert abs(weight - exact) < 1e-4, (token, weight, exact)
        found[name] = len(kept)
        await sampler.cleanup()
    found["allowed"] = int(np.isfinite(np.asarray(weights)).sum())
    assert not set(END_IDS) & {token.token_id for token in target.vocab}
    print(json.dumps(found))


asyncio.run(main())
