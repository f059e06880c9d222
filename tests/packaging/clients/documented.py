"""The examples of the two packages' documentation, on the packaged model."""

import asyncio
import json
import math

import numpy as np
import torch
from genlm.bytes import BeamParams, ByteBeamState
from genlm.control import AWRS, BoolFSA, JsonSchema, PromptedLLM, direct_token_sampler
from genlm.control.sampler import MultiTokenUnitSampler, TokenSetBoundary, flatten_units
from scored import ENDS, TOKENS, model, row

from genlm.backend import load_model_by_name


def decoded(llm, context):
    """The ids of a context, and whether it ended."""
    ids = [token.token_id for token in context if isinstance(token, bytes)]
    return ids, len(ids) < len(context)


def logprob(llm, context, temperature):
    """The log-probability of a context after the prompt, by the oracle."""
    ids, ended = decoded(llm, context)
    sequence, total = list(llm.prompt_ids), 0.0
    end_ids = [token.token_id for token in TOKENS if token.byte_string in ENDS]
    for token_id in ids:
        total += (row(sequence) / temperature).log_softmax(-1)[token_id].item()
        sequence.append(token_id)
    if ended:
        total += torch.logsumexp(
            (row(sequence) / temperature).log_softmax(-1)[end_ids], 0
        ).item()
    return total


async def generated(constraint, prompt, temperature, **options):
    """The README's program: a prompted model, a constraint, AWRS, and its `smc`."""
    np.random.seed(0)
    torch.manual_seed(0)
    llm = PromptedLLM.from_name("demo", eos_byte_strings=ENDS, temperature=temperature)
    llm.set_prompt_from_str(prompt)
    coerced = constraint.coerce(llm, f=b"".join)
    sampler = AWRS(llm, coerced)
    sequences = await sampler.smc(ess_threshold=0.5, verbosity=0, **options)
    for context in sequences.contexts:
        score = llm.complete if decoded(llm, context)[1] else llm.prefix
        plain = [token for token in context if isinstance(token, bytes)]
        exact = logprob(llm, context, temperature)
        assert math.isclose(await score(plain), exact, abs_tol=1e-3), (plain, exact)
    await sampler.cleanup()
    return {text: float(weight) for text, weight in sequences.decoded_posterior.items()}


async def in_words():
    """Units of several tokens; the weight of each is that of its tokens."""
    torch.manual_seed(0)
    np.random.seed(0)
    llm = PromptedLLM(model, eos_byte_strings=ENDS)
    llm.set_prompt_from_str("The value of")
    fsa = BoolFSA.from_regex(r"( [a-z]+)+").coerce(llm, f=b"".join)
    subunits = direct_token_sampler(llm * fsa)
    sampler = MultiTokenUnitSampler(subunits, TokenSetBoundary({b" "}), 8)
    unit, logw, _ = await sampler.sample([])
    context, exact = [], 0.0
    for token in flatten_units([unit]):
        weights = await (llm * fsa).logw_next(context)
        own = row([*llm.prompt_ids, *(t.token_id for t in context)])
        allowed = [t for t in TOKENS if float(weights[t]) > -math.inf]
        assert allowed
        for candidate in allowed:
            assert abs(float(weights[candidate]) - own[candidate.token_id].item()) < 1e-4
        exact += float(weights.sum())
        context.append(token)
    assert math.isclose(float(logw), exact, abs_tol=1e-3), (logw, exact)
    return len(context)


async def bytes_by_beam():
    """The README of genlm-bytes: fill a beam, read the next byte, prune, extend."""
    llm = load_model_by_name("demo", backend="hf")
    beam = await ByteBeamState.initial(llm, BeamParams(K=5, prune_threshold=0.05))
    beam = await beam.prefill(b"The value ")
    found = (await beam.logp_next()).materialize()
    total = np.logaddexp.reduce([found[byte] for byte in range(256)] + [found[257]])
    assert abs(total) < 1e-4, total
    ahead = await (beam.prune() << b"o"[0])
    assert math.isfinite(ahead.logZ)
    await ahead.cleanup()
    return chr(max(range(256), key=found.__getitem__))


async def main():
    regex, schema = BoolFSA.from_regex(r" (type|values?|key) of (a|the)"), {"type": "boolean"}
    found = {
        "regex": await generated(regex, "It is the", 1.0, n_particles=10, max_tokens=30),
        "json": await generated(
            JsonSchema(schema), "The default is", 0.8, n_particles=4, max_tokens=30
        ),
        "unit": await in_words(),
        "byte": await bytes_by_beam(),
    }
    print(json.dumps(found))


asyncio.run(main())
