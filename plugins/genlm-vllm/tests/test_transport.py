"""What reductions and their results are between processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from genlm import EvaluationError
from genlm.core.masks import Mask
from genlm.core.reductions import Draw, DrawnToken, TopK, TopTokens
from genlm.plugin import Reduced
from genlm_vllm.transport import pack_outputs, pack_result, unpack_outputs, unpack_result


def returned(result: Any) -> Any:
    return unpack_result(pack_result(result))


def test_outputs_arrive_equal_with_masks_as_bits() -> None:
    mask = Mask(range(0, 128_000, 3), 128_000)
    outputs = (Draw(0.25, 0.5, mask), None, TopK(4))
    packed = pack_outputs(outputs)
    assert unpack_outputs(packed) == outputs
    assert packed[1] is None
    assert len(packed[0] or b"") <= 16_000 + 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_tensors_arrive_as_the_callers_own(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).view(3, 4)
    [found] = returned(Reduced((tensor[1:],))).values
    assert found.dtype == dtype
    assert torch.equal(found, tensor[1:])
    found.fill_(0)
    assert found.untyped_storage().nbytes() == found.nbytes


def test_tensors_take_few_more_bytes_than_their_values() -> None:
    tokens = TopTokens(torch.randn(10), torch.arange(10))
    [data] = pack_result(Reduced((tokens,)))
    assert len(data) <= 120 + 500
    [found] = returned(Reduced((tokens,))).values
    assert isinstance(found, TopTokens)
    assert torch.equal(found.logprobs, tokens.logprobs)


class PickledAsText(TopK):
    """A reduction that arrives as something else."""

    def __reduce__(self) -> Any:
        return str, ("text",)


def test_what_arrives_as_no_reduction_fails_alone() -> None:
    broken, sound = unpack_outputs(pack_outputs((PickledAsText(2), TopK(2))))
    assert sound == TopK(2)
    assert broken is not None
    [error] = type(broken).compute(torch.zeros(1, 5), [broken])
    assert "pickled as str" in str(error)


def test_results_and_errors_arrive() -> None:
    drawn = DrawnToken(5, -1.0, 0.0, -1.0)
    assert returned(Reduced((drawn, 0.5, None))) == Reduced((drawn, 0.5, None))
    error = returned(EvaluationError("not a distribution"))
    assert isinstance(error, EvaluationError)
    assert str(error) == "not a distribution"


def test_a_result_that_cannot_be_loaded_fails_alone() -> None:
    packed = pack_result(Reduced((1, 2)))
    assert isinstance(packed, list)
    packed[0] = pickle.dumps(TopK(1)).replace(b"TopK", b"Gone")
    found = unpack_result(packed)
    assert isinstance(found, Reduced)
    assert isinstance(found.values[0], EvaluationError)
    assert "cannot be loaded" in str(found.values[0])
    assert found.values[1] == 2
