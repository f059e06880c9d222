from __future__ import annotations
from .tiny import alone, answers, ids_of_lengths


def test_rows_are_those_of_an_unbatched_forward_pass(engine, llama):
    sequences = ids_of_lengths(9, 1, 23, 4, 23)
    for ids, row in zip(sequences, answers(engine, sequences)):
        assert (row - alone(llama, ids)).abs().max() <= 1e-4
