"""Shared by the programs here: the packaged model and its unbatched rows."""

import functools

import torch
from genlm.control import PromptedLLM

from genlm.backend.llm import AsyncTransformer

PROMPT = "The value of"

ENDS = [b" is", b".", b",", b" in"]

model = AsyncTransformer.from_name("demo")
TOKENS = model.byte_vocab
END_IDS = [token.token_id for token in TOKENS if token.byte_string in ENDS]

llm = PromptedLLM(model, eos_byte_strings=ENDS)
llm.set_prompt_from_str(PROMPT)


def row(token_ids):
    """The oracle: transformers' forward pass of one sequence, in float32, without a past."""
    return _row(tuple(token_ids))


@functools.cache
def _row(token_ids):
    with torch.no_grad():
        logits = model.model(torch.tensor([token_ids]), use_cache=False).logits
    return logits[0, -1, : len(TOKENS)].float().log_softmax(-1).double()


def spellings(text, token_ids=()):
    """Every way to write bytes in tokens, as lists of ids."""
    if not text:
        yield list(token_ids)
    for token in TOKENS:
        if token.token_id not in END_IDS and text.startswith(token.byte_string):
            yield from spellings(text[len(token) :], (*token_ids, token.token_id))


def logprob(token_ids, *, ends):
    """The log-probability of tokens after the prompt, by the oracle."""
    context, total = list(llm.prompt_ids), 0.0
    for token_id in token_ids:
        total += row(context)[token_id].item()
        context.append(token_id)
    return total + torch.logsumexp(row(context)[END_IDS], 0).item() if ends else total
