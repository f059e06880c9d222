"""Texts on engines without `Capability.SCORE`: a group of the prefixes of a text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from genlm.core.queries.generations import Generation, Lineage
from genlm.core.queries.query import (
    ROW_ONLY,
    Completion,
    GroupQuery,
    GroupReduction,
    GroupResult,
    Query,
    Reduced,
    TokenScores,
)
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.logits import moved

__all__ = ["ScoreColumns", "text_completion", "text_group"]


class ScoreColumns(GroupReduction):
    """The score of one token of each member: the columns of `TokenScores`.

    Args:
        token_ids: Shape `(n,)`, int64, in main memory.
    """

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the tokens, and compare them with the largest entries."""
        places = moved(row_of, rows.device)
        logprobs = rows[places, moved(self.token_ids[members], rows.device)]
        return logprobs, logprobs >= rows.amax(-1)[places]


def text_group(query: Query) -> GroupQuery:
    """Return the group query for the rows that predict the targets of a query."""
    [output] = query.outputs
    reduction = output if isinstance(output, GroupReduction) else None
    lineage = Lineage.of_sequences(list(_prefixes(query)))
    places = np.arange(len(lineage))
    return GroupQuery(
        query.query_id,
        Generation(lineage),
        places,
        places,
        reduction or ScoreColumns(torch.tensor(query.targets)),
        query.adapter,
    )


def text_completion(query: Query, completion: Completion) -> Completion:
    """Return the completion of a query with targets from that of its group query.

    If rows of several positions failed, the error is that of the first.
    """
    result = completion.result
    if not isinstance(result, GroupResult):
        return completion
    if result.errors:
        return Completion(query.query_id, error=result.errors[min(result.errors)])
    columns = result.columns
    is_scored = query.outputs == ROW_ONLY
    return Completion(
        query.query_id, TokenScores(*columns) if is_scored else Reduced((columns,))
    )


def _prefixes(query: Query) -> Iterator[TokenSequence]:
    """Yield the prefixes of a text after which its targets follow."""
    token_ids, length = query.token_ids, query.first_target + 1
    sequence = TokenSequence.of(token_ids[:length])
    yield sequence
    for token_id in token_ids[length:]:
        sequence = TokenSequence.of([token_id], sequence)
        yield sequence
