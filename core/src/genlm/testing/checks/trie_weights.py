"""Checks of what weights may be, and whose memory results are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from genlm import WeightsError
from genlm.testing.check import trie_check
from genlm.testing.failure import expect
from genlm.testing.trie_trial import TrieTrial
from genlm.testing.vocabularies import tokens, vocabularies

OPERATIONS = ("sum", "max", "logsumexp")
WORDS = tokens(b"", b"a", b"ab", b"abc", b"b", b"b", b"\xff")


@trie_check(cases=("no rows", "one row", "several rows", "rows in a list"))
def rows_of_a_batch_are_independent(trial: TrieTrial) -> None:
    """Each row of a batch has the result that it has alone, whatever the others are."""

    def law(vocabulary: Any, rows: int, data: st.DataObject) -> None:
        trie = trial.build(vocabulary)
        shape = (rows, len(vocabulary))
        drawn = np.random.default_rng(data.draw(st.integers(0, 1000))).normal(size=shape)
        ws = drawn.astype(np.float32)
        ws[1:2] *= 1e30  # a row that would spoil its neighbours
        for operation in OPERATIONS:
            given = np.abs(ws) if operation == "sum" else ws
            batches: dict[str, Any] = {
                "rows": given,
                "rows in a list": list(torch.from_numpy(given)),
            }
            for case, batch in batches.items():
                together = trial.reduced_batch(trie, batch, operation)
                expect(
                    tuple(together.shape) == (rows, len(trie)),
                    f"results of shape {(rows, len(trie))}",
                    tuple(together.shape),
                    operation=operation,
                )
                for values, row in zip(together, given, strict=True):
                    trial.check_values(trie, values, row, operation, rows=rows)
                trial.saw(case)
        trial.saw("no rows", rows == 0)
        trial.saw("one row", rows == 1)
        trial.saw("several rows", rows > 1)

    for rows in (0, 1, 2, 5):
        trial.for_all(
            law,
            examples=max(2, trial.profile.examples // 4),
            vocabulary=vocabularies(max_size=8),
            rows=st.just(rows),
            data=st.data(),
        )


@trie_check(cases=("numpy", "torch", "list", "bfloat16", "float64"))
def numbers_of_any_kind(trial: TrieTrial) -> None:
    """Numpy, torch and lists, of any precision, are weights; half precision gives float32."""
    trie = trial.build(WORDS)
    exact = trial.weights(len(WORDS)).double() + 1e-3
    for name in trial.target.dtypes:
        given = exact.to(getattr(torch, name))
        kinds: dict[str, Any] = {"torch": given}
        if name != "bfloat16":
            kinds["numpy"] = given.numpy()
        for kind, ws in kinds.items():
            for operation in OPERATIONS:
                values = trial.reduced(trie, ws, operation)
                wanted = "float64" if name == "float64" else "float32"
                expect(str(values.dtype) == wanted, f"{wanted} of {name}", values.dtype)
                trial.check_values(trie, values, given, operation, dtype=name, kind=kind)
            trial.saw(kind)
        trial.saw(name)
    ws = exact.tolist()
    trial.check_values(trie, trial.reduced(trie, ws, "sum"), np.array(ws), "sum", kind="list")
    trial.saw("list")


@trie_check(cases=("weights", "batch of weights", "result"))
def weights_stay_and_results_belong_to_the_caller(trial: TrieTrial) -> None:
    """Neither are weights changed, nor does a result share memory with them or another."""
    trie = trial.build(WORDS)
    for operation in OPERATIONS:
        for kind in ("numpy", "torch"):
            ws: Any = trial.weights(len(WORDS))
            before = ws.clone()
            ws = ws.numpy() if kind == "numpy" else ws
            first = trial.reduced(trie, ws, operation, returns=kind)
            trial.reduced_batch(trie, ws[None], operation)
            expect(
                bool((torch.as_tensor(ws) == before).all()),
                "the weights as they were",
                ws,
                operation=operation,
            )
            trial.saw("weights")
            trial.saw("batch of weights")
            first[:] = 7.0
            again = trial.reduced(trie, ws, operation, returns=kind)
            trial.check_values(trie, again, before, operation, changed="an earlier result")
            later = trial.reduced(trie, -before, operation, returns=kind)
            trial.check_values(trie, again, before, operation, then="another reduction")
            expect(len(later) == len(trie), f"{len(trie)} values", len(later))
            trial.saw("result")


@trie_check(cases=("numpy", "torch"))
def results_come_as_asked(trial: TrieTrial) -> None:
    """Results are numpy arrays, or with `returns="torch"` tensors on the weights' device."""
    trie = trial.build(WORDS)
    for device in trial.target.devices:
        ws = trial.weights(len(WORDS)).to(device)
        for operation in OPERATIONS:
            for reduced, given in ((trial.reduced, ws), (trial.reduced_batch, ws[None])):
                array = reduced(trie, given, operation)
                expect(isinstance(array, np.ndarray), "a numpy array", type(array).__name__)
                trial.saw("numpy")
                tensor = reduced(trie, given, operation, returns="torch")
                found = getattr(tensor, "device", type(tensor).__name__)
                expect(found == ws.device, f"a tensor on {ws.device}", found)
                trial.devices.add(str(found))
                row, same = (tensor, array) if tensor.ndim == 1 else (tensor[0], array[0])
                trial.check_values(trie, row, ws, operation, device=device)
                trial.check_values(trie, same, ws, operation, device=device)
                trial.saw("torch")


@trie_check(cases=("too short", "too long", "too many dimensions", "text"))
def wrong_weights_are_refused(trial: TrieTrial) -> None:
    """Weights of another shape or kind raise `WeightsError` and are never stretched to fit."""
    trie = trial.build(WORDS)
    ws = trial.weights(len(WORDS)).numpy()
    wrong = {
        "too short": ws[:-1],
        "too long": np.append(ws, 0.0),
        "one number": ws[:1],
        "too many dimensions": ws[None],
        "text": np.array(["a"] * len(WORDS)),
    }
    for case, given in wrong.items():
        for operation in OPERATIONS:
            try:
                found = trial.reduced(trie, given, operation)
            except WeightsError:
                trial.saw(case)
                continue
            expect(False, "WeightsError", f"values {found}", case=case, operation=operation)
    values = trial.reduced(trie, ws, "sum")
    trial.check_values(trie, values, ws, "sum", after="wrong weights")
