"""`ReferenceEngine`: serves the byte n-gram model of `ngram.py`.

Its adapters stand for LoRA adapters: they are loaded by name and selected per request. An
adapter is a folder with a `text.txt`; a second model of the same order is counted on that text,
and the distribution for a request with the adapter is

    (1 - w) P_base + w P_adapter,    w = adapter_weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from genlm.core.base.errors import AdapterError, ModelLoadError
from genlm.core.base.statistics import Count
from genlm.core.base.validation import checked_number, is_integer
from genlm.core.engine.batch_engine import BatchEngine
from genlm.core.engine.engine import Capability
from genlm.core.queries.query import Query
from genlm.core.reference.ngram import Floats, NgramModel, exact_row
from genlm.core.reference.tokenizer import byte_vocabulary, default_text, split_documents
from genlm.engines.adapter_table import AdapterTable

if TYPE_CHECKING:
    import torch


class ReferenceEngine(BatchEngine):
    """Exact next-byte distributions of an interpolated n-gram model.

    Token i is byte i; 256 ends a text and, as the first token of a prompt, begins one.
    Rows are on the CPU. Only the newest `order - 1` tokens of a prompt matter.

    Args:
        model: `"demo"` for the text in the package, or the path of a text file. Blank lines
            separate its documents; white space around them is removed.
        text: Training text in place of `model`, which must then be `"demo"`.
        order: Length of the longest n-gram.
        adapter_weight: Share of the adapter in an adapted distribution, in (0, 1].
        max_context: Maximum number of tokens of a query, None for no limit.

    Raises:
        ModelLoadError: The text cannot be read or is empty, or an option is out of
            range.
        TypeError: An option has another type.
    """

    capabilities = frozenset({Capability.LORA})

    def __init__(
        self,
        model: str = "demo",
        *,
        text: str | bytes | None = None,
        order: int = 3,
        adapter_weight: float = 0.5,
        max_context: int | None = None,
    ) -> None:
        if not is_integer(order):
            raise TypeError(f"order={order!r}; expected an integer, 1 or more")
        if order < 1:
            raise ModelLoadError(f"an n-gram model of order {order}; the minimum is 1")
        if not 0 < checked_number("adapter_weight", adapter_weight) <= 1:
            raise ModelLoadError(
                f"adapter_weight is {adapter_weight}; expected a share above 0, at most 1"
            )
        if text is not None and model != "demo":
            raise ModelLoadError(f"both model={model!r} and text were passed; pass one")
        self.order = order
        self.adapter_weight = adapter_weight
        self.max_context = max_context
        self.vocabulary = byte_vocabulary()
        self._documents = split_documents(_read_model(model) if text is None else text)
        if not self._documents:
            raise ModelLoadError("the training text is empty; an n-gram model needs a text")
        self._base = NgramModel(self._documents, order)
        self._adapters = _Adapters(order)
        self._tokens_computed = 0

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        """Compute the rows of a batch, in float64 until the conversion to logs."""
        import torch

        by_adapter: dict[str, list[int]] = {}
        for index, query in enumerate(queries):
            if query.adapter is not None:
                self._adapters.check_loaded(query.adapter)
                by_adapter.setdefault(query.adapter, []).append(index)
        history = self.order - 1
        contexts = [query.sequence.ids_from(max(0, len(query) - history)) for query in queries]
        rows = self._base.probabilities(contexts)
        for name, indices in by_adapter.items():
            model = self._adapters.loaded[name].model
            rows[indices] = self._mix(
                rows[indices], model.probabilities([contexts[i] for i in indices])
            )
        self._tokens_computed += sum(map(len, contexts))
        return torch.from_numpy(np.log(rows).astype(np.float32))

    def exact_row(self, token_ids: Sequence[int], adapter: str | None = None) -> Floats:
        """Compute one distribution directly from the formula, by scanning the text.

        This method shares no code with `evaluate`; it is an oracle for tests of engines and
        clients.

        Returns:
            Probabilities (no logs), shape `(257,)`, float64.

        Raises:
            UnknownAdapterError: No adapter of this name is loaded.
        """
        row = exact_row(self._documents, token_ids, self.order)
        if adapter is None:
            return row
        self._adapters.check_loaded(adapter)
        documents = self._adapters.loaded[adapter].documents
        return self._mix(row, exact_row(documents, token_ids, self.order))

    def add_adapter(self, name: str, path: str) -> None:
        """Count the text of `path/text.txt` as adapter `name`.

        Raises:
            AdapterError: The name is in use, or `text.txt` in the folder is missing,
                unreadable or empty; the engine is unchanged.
        """
        self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            UnknownAdapterError: No adapter of this name is loaded.
        """
        self._adapters.remove(name)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return the number of tokens read, at most `order - 1` per query, and model sizes."""
        return {
            "tokens_computed": Count(self._tokens_computed),
            "order": self.order,
            "training_bytes": sum(map(len, self._documents)),
            "adapters": len(self._adapters.names),
        }

    def _mix(self, base: Floats, adapter: Floats) -> Floats:
        return (1 - self.adapter_weight) * base + self.adapter_weight * adapter


class _Adapter(NamedTuple):
    """A text and the model that was counted on it."""

    documents: list[bytes]
    model: NgramModel


class _Adapters(AdapterTable[_Adapter]):
    def __init__(self, order: int) -> None:
        super().__init__()
        self._order = order

    def _load(self, name: str, path: Path) -> _Adapter:  # noqa: ARG002
        try:
            documents = split_documents((path / "text.txt").read_bytes())
        except OSError as error:
            raise AdapterError(
                f"no adapter in {str(path)!r}; expected a folder with a text.txt ({error})"
            ) from error
        if not documents:
            raise AdapterError(f"the text.txt of the adapter in {str(path)!r} is empty")
        return _Adapter(documents, NgramModel(documents, self._order))


def _read_model(model: str) -> bytes:
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(
            f"asked for the model {model!r}; pass 'demo' or the path of a text file"
        )
    if model == "demo":
        return default_text()
    try:
        return Path(model).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ModelLoadError(
            f"no text to train the reference engine at {model!r} ({error}); pass 'demo' or the "
            f"path of a text file"
        ) from error
