"""Texts on engines without `Capability.SCORE`: a group of the prefixes of a text."""

from __future__ import annotations

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
from genlm.core.rows.group_reductions import ScoreColumns


def text_group(query: Query) -> GroupQuery:
    """Return the group query for the rows that predict the targets of a query."""
    [output] = query.outputs
    reduction = output if isinstance(output, GroupReduction) else None
    # The prefixes of the text after which its targets follow.
    lengths = range(query.first_target + 1, len(query) + 1)
    lineage = Lineage.of_sequences([query.sequence.prefix(length) for length in lengths])
    places = np.arange(len(lineage))
    return GroupQuery(
        query.query_id,
        Generation(lineage),
        places,
        places,
        reduction or ScoreColumns(torch.tensor(query.targets, device="cpu")),
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
