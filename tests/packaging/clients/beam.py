"""A byte-level beam of genlm-bytes against sums over all tokens of the oracle's rows."""

import asyncio
import json
import math

import torch
from genlm.bytes import BeamParams, ByteBeamState
from genlm.control import ByteLLM
from scored import TOKENS, model, row

EOS_ID = model.tokenizer.eos_token_id
EOS = TOKENS[EOS_ID].byte_string
START = [model.tokenizer.bos_token_id]


def below(prefix, logprobs):
    """The log-probability that the next token begins with some bytes."""
    ids = [
        t.token_id for t in TOKENS if t.token_id != EOS_ID and t.byte_string.startswith(prefix)
    ]
    return torch.logsumexp(logprobs[ids], 0).item() if ids else -math.inf


def first_bytes(token_ids):
    own = row(token_ids)
    return {byte: below(bytes([byte]), own) for byte in range(256)}


def two_bytes(first, second):
    """Both in one token, or a token of one byte and then another token."""
    own = row(START)
    total = [below(bytes([first, second]), own)]
    total += [
        own[token.token_id].item() + below(bytes([second]), row([*START, token.token_id]))
        for token in TOKENS
        if token.byte_string == bytes([first])
    ]
    return torch.logsumexp(torch.tensor(total), 0).item()


async def main():
    params = BeamParams(K=2000, eos_byte_strings=[EOS], prune_threshold=0)
    beam = await ByteBeamState.initial(model, params)
    found = (await beam.logp_next()).materialize()
    for byte, exact in first_bytes(START).items():
        if exact > -20:
            assert abs(found[byte] - exact) < 1e-4, (byte, found[byte], exact)
    for text in (b"Th", b"an", b"#i"):
        ahead = await (await (beam.prune() << text[0])).prefill(text[1:])
        assert abs(ahead.logZ - two_bytes(*text)) < 1e-4, (text, ahead.logZ, two_bytes(*text))
    written = await beam.greedy(b"The val", steps=8)
    await beam.cleanup()

    async with ByteLLM(model, BeamParams(K=5, eos_byte_strings=[EOS])) as byte_llm:
        byte_llm.set_prompt_from_str("The ")
        score = await byte_llm.prefix([bytes([byte]) for byte in b"value"])
    print(json.dumps({"greedy": written.decode(), "score": float(score)}))


asyncio.run(main())
