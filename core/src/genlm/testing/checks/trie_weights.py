"""Checks of the kinds of weights and of the memory of results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm import WeightsError
from genlm.testing.check import expect, trie_check
from genlm.testing.strategies import tokens, vocabularies
from genlm.testing.trie_fixture import TrieFixture

OPERATIONS = ("sum", "max", "logsumexp")
WORDS = tokens(b"", b"a", b"ab", b"abc", b"b", b"b", b"\xff")


@trie_check()
def rows_of_a_batch_are_independent(fixture: TrieFixture) -> None:
    """The result of a row does not depend on the other rows of its batch."""

    def holds(vocabulary: Any, rows: int, data: st.DataObject) -> None:
        trie = fixture.build(vocabulary)
        shape = (rows, len(vocabulary))
        samples = np.random.default_rng(data.draw(st.integers(0, 1000))).normal(size=shape)
        ws = samples.astype(np.float32)
        ws[1:2] *= 1e30  # a row that could affect its neighbours
        for operation in OPERATIONS:
            weights = np.abs(ws) if operation == "sum" else ws
            batch: Any
            for batch in (weights, list(torch.from_numpy(weights))):
                together = fixture.reduce_batch(trie, batch, operation)
                expect(
                    tuple(together.shape) == (rows, len(trie)),
                    f"results of shape {(rows, len(trie))}",
                    tuple(together.shape),
                    operation=operation,
                )
                for values, row in zip(together, weights, strict=True):
                    fixture.check_values(trie, values, row, operation, rows=rows)

    for rows in (0, 1, 2, 5):
        fixture.for_all(
            holds,
            examples=max(2, fixture.profile.max_examples // 4),
            vocabulary=vocabularies(max_size=8),
            rows=st.just(rows),
            data=st.data(),
        )


@trie_check()
def numbers_of_any_kind(fixture: TrieFixture) -> None:
    """Weights may be numpy, torch or lists of any precision; half precision returns float32."""
    trie = fixture.build(WORDS)
    exact = fixture.weights(len(WORDS)).double() + 1e-3
    for name in fixture.target.dtypes:
        weights = exact.to(getattr(torch, name))
        kinds: dict[str, Any] = {"torch": weights}
        if name != "bfloat16":
            kinds["numpy"] = weights.numpy()
        for kind, ws in kinds.items():
            for operation in OPERATIONS:
                values = fixture.reduce(trie, ws, operation)
                dtype = "float64" if name == "float64" else "float32"
                expect(str(values.dtype) == dtype, f"{dtype} of {name}", values.dtype)
                fixture.check_values(trie, values, weights, operation, dtype=name, kind=kind)
    ws = exact.tolist()
    fixture.check_values(
        trie, fixture.reduce(trie, ws, "sum"), np.array(ws), "sum", kind="list"
    )


@trie_check()
def weights_stay_and_results_belong_to_the_caller(fixture: TrieFixture) -> None:
    """Weights are not modified, and a result shares no memory with them or other results."""
    trie = fixture.build(WORDS)
    for operation in OPERATIONS:
        for kind in ("numpy", "torch"):
            ws: Any = fixture.weights(len(WORDS))
            before = ws.clone()
            ws = ws.numpy() if kind == "numpy" else ws
            first = fixture.reduce(trie, ws, operation, returns=kind)
            fixture.reduce_batch(trie, ws[None], operation)
            expect(
                bool((torch.as_tensor(ws) == before).all()),
                "the weights as they were",
                ws,
                operation=operation,
            )
            first[:] = 7.0
            again = fixture.reduce(trie, ws, operation, returns=kind)
            fixture.check_values(trie, again, before, operation, changed="an earlier result")
            later = fixture.reduce(trie, -before, operation, returns=kind)
            fixture.check_values(trie, again, before, operation, then="another reduction")
            expect(len(later) == len(trie), f"{len(trie)} values", len(later))


@trie_check()
def results_have_the_requested_type(fixture: TrieFixture) -> None:
    """Results are numpy arrays, or with `returns="torch"` tensors on the weights' device."""
    trie = fixture.build(WORDS)
    for device in fixture.target.devices:
        ws = fixture.weights(len(WORDS)).to(device)
        for operation in OPERATIONS:
            for reduce, weights in ((fixture.reduce, ws), (fixture.reduce_batch, ws[None])):
                array = reduce(trie, weights, operation)
                expect(isinstance(array, np.ndarray), "a numpy array", type(array).__name__)
                tensor = reduce(trie, weights, operation, returns="torch")
                placement = getattr(tensor, "device", type(tensor).__name__)
                expect(placement == ws.device, f"a tensor on {ws.device}", placement)
                fixture.devices.add(str(placement))
                for values in (tensor, array):
                    row = values if values.ndim == 1 else values[0]
                    fixture.check_values(trie, row, ws, operation, device=device)


@trie_check()
def wrong_weights_are_refused(fixture: TrieFixture) -> None:
    """Weights of another shape or kind raise `WeightsError` and are never broadcast."""
    trie = fixture.build(WORDS)
    ws = fixture.weights(len(WORDS)).numpy()
    wrong = {
        "too short": ws[:-1],
        "too long": np.append(ws, 0.0),
        "one number": ws[:1],
        "too many dimensions": ws[None],
        "text": np.array(["a"] * len(WORDS)),
    }
    for case, weights in wrong.items():
        for operation in OPERATIONS:
            call = fixture.reduce, trie, weights, operation
            fixture.expect_error(WeightsError, *call, case=case, operation=operation)
    values = fixture.reduce(trie, ws, "sum")
    fixture.check_values(trie, values, ws, "sum", after="wrong weights")
