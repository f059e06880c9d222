"""JSON that fits a schema and a check in Python, with the weights that make samples unbiased.

xgrammar (`pip install 'genlm-core[xgrammar]'`) masks the tokens that break the schema. A rule
that no schema can express is a function, called for drawn tokens only: tokens are drawn without
replacement until one is accepted, and two more estimate the mass of all that would be accepted
(adaptive weighted rejection sampling, arXiv 2504.05410). `exp(log_evidence)` estimates without
bias the probability that the model by itself writes such a document and ends.
"""

import asyncio
import re
import sys
from itertools import pairwise

from genlm import AsyncLM, load_model
from genlm.constraints import Grammar, Python
from genlm.smc import Particles, steer

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 3}


def is_ascending(text: bytes) -> bool:
    """Whether each number is larger than the one before; also of the beginning of a list."""
    return all(first < second for first, second in pairwise(re.findall(rb"\d", text)))


async def ascending_lists(llm: AsyncLM, prompt: str, size: int, seed: int) -> Particles:
    """Return weighted lists of digits that continue a prompt."""
    schema = Grammar.json_schema(SCHEMA, any_whitespace=False)
    language = Python(is_ascending, within=schema)
    steps = steer(llm, llm.encode(prompt), size, max_tokens=12, constraint=language, seed=seed)
    *_, particles = [each async for each in steps]
    return particles


async def _main(*backend: str) -> None:
    with load_model("demo", *backend) as llm:
        particles = await ascending_lists(llm, ">>> sorted(digits)\n", size=100, seed=0)
        print(particles)
        print(particles.history)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:2]))  # an engine's name; by default the one installed
