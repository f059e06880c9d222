"""Log-probabilities of whole texts, perplexity and mutual information.

A score is the log-probability of each token of a text given the previous tokens; no row leaves
the engine. The scores of all texts are one request.
"""

import math
import sys

import genlm


def logprobs(llm, texts, contexts):
    """Return the log-probability of each text after its context of at least one token."""
    both = [context + text for text, context in zip(texts, contexts)]
    scores = llm.batch_score_sync(both, [len(context) for context in contexts])
    return [float(score.double().sum()) for score in scores]


def beginning(llm):
    """Return the tokens that begin a text; with Qwen's tokenizers, the end of another text."""
    return llm.encode("") or [llm.vocabulary.eos_token_id]


def mutual_information(llm, first, second):
    """Pointwise mutual information in nats: how much likelier `second` is after `first`."""
    ids, start = llm.encode_continuation(first, second)
    contexts = [ids[:start], beginning(llm)]
    after, alone = logprobs(llm, [ids[start:]] * 2, contexts)
    return after - alone


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        texts = ["The function returns a list.", "A list the returns function."]
        encoded = [llm.encode(text, begin=False) for text in texts]
        scores = logprobs(llm, encoded, [beginning(llm)] * len(texts))
        for text, ids, score in zip(texts, encoded, scores):
            print(f"{score:8.3f}  perplexity {math.exp(-score / len(ids)):7.1f}  {text}")
        for second in (" the call raises an exception.", " the sun is warm."):
            pmi = mutual_information(llm, "If the argument is negative,", second)
            print(f"{pmi:8.3f}  {second!r}")
