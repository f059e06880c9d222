"""What reductions and scores of engines must be, computed from rows in float64.

For engines that compute both where their rows are; its reduction is importable in the processes
that an engine starts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from genlm import AsyncLM, Reduction
from genlm.core.rows.masks import Mask
from genlm.core.rows.reductions import Draw, LogMass, TokenLogprobs, TopK
from genlm.plugin import TokenScores, stream_uniform
from genlm.testing import TINY_VOCABULARY, TinyModel

TOLERANCE = 1e-4

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Entropy(Reduction):
    """A reduction of a caller's own."""

    @classmethod
    def compute(cls, rows: torch.Tensor, requests: Sequence[Entropy]) -> Sequence[float]:
        assert len(rows) == len(requests)
        return torch.special.entr(rows.exp()).sum(-1).tolist()


def mask(seed: int, share: float = 0.3) -> Mask:
    """A random set of tokens, always the same for a seed."""
    generator = random.Random(seed)
    ids = [i for i in range(TINY_VOCABULARY) if generator.random() < share]
    return Mask(ids, TINY_VOCABULARY)


def outputs_of(number: int, entropy: Entropy) -> tuple[Any, ...]:
    """Different things to ask, several of them for one row and each of them alone."""
    all_of_them = (
        TopK(1 + number),
        LogMass(mask(number)),
        None,
        Draw(stream_uniform(number, 3), 0.7, mask(number + 1)),
        TokenLogprobs((number, 299, 4)),
        Draw(stream_uniform(number, 4)),
        entropy,
    )
    return all_of_them if number % 3 == 0 else (all_of_them[number % 7],)


def drawn_token(row: torch.Tensor, draw: Draw) -> int:
    """Invert the cumulative distribution of a row."""
    kept = torch.tensor([draw.mask is None or i in draw.mask for i in range(TINY_VOCABULARY)])
    cumulative = ((row / draw.temperature).exp() * kept).cumsum(-1)
    return int(torch.searchsorted(cumulative, draw.uniform * cumulative[-1], right=True))


def check_output(value: Any, output: Any, row: torch.Tensor) -> None:
    """Compare the result of an output with the row of its context, in float64."""
    match output:
        case None:
            assert (value.cpu() - row).abs().max() <= TOLERANCE
            assert value.untyped_storage().nbytes() == value.nbytes
            assert not value.is_inference()
        case TokenLogprobs():
            assert (value - row[list(output.token_ids)]).abs().max() <= TOLERANCE
        case TopK():
            expected = row.topk(output.k).values
            assert (value.logprobs - expected).abs().max() <= TOLERANCE
            assert (row[value.token_ids] - expected).abs().max() <= TOLERANCE
        case LogMass():
            assert abs(value - float(row[list(output.mask)].logsumexp(-1))) <= TOLERANCE
        case Draw():
            assert value.token_id == drawn_token(row, output)
            assert abs(value.logprob - float(row[value.token_id])) <= TOLERANCE
            allowed = row if output.mask is None else row[list(output.mask)]
            assert abs(value.log_mass - float(allowed.logsumexp(-1))) <= TOLERANCE
        case Entropy():
            assert abs(value - float(torch.special.entr(row.exp()).sum())) <= 1e-3
        case _:
            raise AssertionError(output)


def check_outputs(result: Any, outputs: tuple[Any, ...], row: torch.Tensor) -> None:
    """Compare the result of a query with the row of its context."""
    values = (result,) if outputs == (None,) else result.values
    for value, output in zip(values, outputs, strict=True):
        check_output(value, output, row)


def check_scores(
    found: Any, tiny: TinyModel, text: Ids, start: int, adapter: str | None = None
) -> None:
    """Compare the scores of a text with the rows of an unbatched forward pass."""
    assert isinstance(found, TokenScores), found
    assert found.logprobs.shape == found.is_top.shape == (len(text) - start,)
    assert (found.logprobs.dtype, found.is_top.dtype) == (torch.float32, torch.bool)
    rows = tiny.all_logprobs(text[:-1], adapter)[start - 1 :]
    targets = torch.tensor(text[start:])
    expected = rows.gather(1, targets[:, None])[:, 0]
    assert ((found.logprobs - expected).abs() <= TOLERANCE).all()
    assert found.is_top.tolist() == (rows.argmax(-1) == targets).tolist()


class _Borrowed:
    """An engine that its model does not close."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


def check_scores_of_a_model(
    engine: Any, tiny: TinyModel, texts: Sequence[Ids], steps: str
) -> None:
    """`AsyncLM` asks for all positions at once, and once for the same text.

    Args:
        engine: Keeps running.
        tiny: Its model.
        texts: Three.
        steps: The name of the steps in the engine's statistics.
    """
    starts = [1, 5, 20]
    with AsyncLM(lambda: _Borrowed(engine), name="borrowed") as llm:
        found = llm.batch_token_scores_sync(texts, starts)
        for scores, text, start in zip(found, texts, starts, strict=True):
            check_scores(scores, tiny, text, start)
        before = engine.statistics()[steps]
        again = llm.batch_score_sync(texts, starts)
        assert engine.statistics()[steps] == before
        assert all(torch.equal(a, b.logprobs) for a, b in zip(again, found, strict=True))
