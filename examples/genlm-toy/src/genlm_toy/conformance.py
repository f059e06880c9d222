"""What `genlm check toy` needs: a model to load and its correct rows."""

from math import log

from genlm.testing import EngineTarget
from genlm_toy.engine import ToyEngine


def logprobs(token_ids, adapter):
    """The closed form, one sequence at a time, in float64."""
    weights = [1.0] * 256
    for age, byte in enumerate(reversed(token_ids), start=1):
        weights[byte] += 1 / age
    total = sum(weights)
    return [log(weight / total) for weight in weights]


target = EngineTarget(model="bytes", build=lambda: ToyEngine("any"), oracle=logprobs)
