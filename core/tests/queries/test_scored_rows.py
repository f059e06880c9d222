"""The rows that predict the tokens of continuations, against lists of tuples."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.queries.generations import first_generation
from genlm.core.queries.query import GroupQuery
from genlm.core.queries.scored_rows import scored_rows
from genlm.core.queries.sequence import TokenSequence
from genlm.core.rows.group_reductions import ScoreColumns

TEXTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=3),
        st.lists(st.integers(0, 1), max_size=4),
    ),
    min_size=1,
    max_size=6,
).filter(lambda texts: any(added for _, added in texts))


@given(TEXTS)
def test_rows_are_those_after_the_distinct_beginnings_of_texts(texts: Any) -> None:
    generation, places = first_generation([TokenSequence.of(ids) for ids, _ in texts])
    width = max(len(added) for _, added in texts) + 1  # a column without tokens
    ids = np.full((len(texts), width), -1)
    for row, (_, added) in enumerate(texts):
        ids[row, : len(added)] = added
    scored = scored_rows(generation, places, ids)
    query = GroupQuery(
        *(0, scored.generation, scored.wanted, scored.row_of),
        ScoreColumns(None),  # type: ignore[arg-type]
        dropped=scored.dropped,
    )
    sequences = [sequence.token_ids for sequence in query.sequences(slice(None))]
    assert list(query.lengths) == [len(sequence) for sequence in sequences]
    assert len(query) == sum(map(len, sequences))
    found = [sequences[row] for row in scored.row_of]
    assert found == [
        (*start, *added[:place]) for start, added in texts for place in range(len(added))
    ]
    assert scored.members.tolist() == [
        member for member, (_, added) in enumerate(texts) for _ in added
    ]
    # Each row of a sequence follows one token more than the row before it.
    order = list(zip(scored.wanted, query.lengths, strict=True))
    assert order == sorted(set(order))
    assert set(scored.wanted[scored.dropped == 0]) == set(scored.wanted)
    lineage = scored.generation.lineage
    for (start, added), sequence, last in zip(
        texts, lineage.sequences(scored.places), scored.last_ids, strict=True
    ):
        assert sequence.token_ids == (*start, *added[:-1])
        assert last == (added[-1] if added else -1)
