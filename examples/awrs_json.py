"""JSON that fits a schema and a check in Python, with the weights that make samples unbiased.

xgrammar (`pip install 'genlm-core[xgrammar]'`) masks the tokens that break the schema. A rule
that no schema can express is a function, called for drawn tokens only: tokens are drawn without
replacement until one is accepted, and two more estimate the mass of all acceptable tokens
(adaptive weighted rejection sampling, arXiv 2504.05410). `exp(log_evidence)` is an unbiased
estimate of the probability that an unconstrained sample is such a document.
"""

import re
import sys
from itertools import pairwise

import genlm
from genlm.constraints import Grammar, Python
from genlm.smc import steer_sync

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 3}


def is_ascending(text):
    """Whether each number is larger than the one before; also of the beginning of a list."""
    return all(first < second for first, second in pairwise(re.findall(rb"\d", text)))


def ascending_lists(llm, prompt, size, seed=0):
    """Return weighted lists of digits that continue a prompt."""
    schema = Grammar.json_schema(SCHEMA, any_whitespace=False)
    language = Python(is_ascending, within=schema)
    *_, particles = steer_sync(
        llm, llm.encode(prompt), size, max_tokens=12, constraint=language, seed=seed
    )
    return particles


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        particles = ascending_lists(llm, ">>> sorted(digits)\n", size=100)
        print(particles)
        print(particles.history)
