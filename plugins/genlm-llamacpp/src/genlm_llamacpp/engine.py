"""`LlamaCppEngine`: GGUF files on llama.cpp as a genlm engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from genlm.plugin import (
    BatchEngine,
    Capability,
    EvaluationError,
    GroupQuery,
    GroupValues,
    ModelLoadError,
    Query,
    TokenSequence,
    check_query,
    model_source,
    rows_from_logits,
)
from genlm.prefix import PieceScores, ScoredText
from genlm_llamacpp.adapters import Adapters
from genlm_llamacpp.batch import (
    Extensions,
    Integers,
    Logits,
    TokenBatch,
    build_batch,
    ranges,
)
from genlm_llamacpp.context import CACHE_TYPES, CacheFullError, ContextOptions, LlamaContext
from genlm_llamacpp.division import parts_for
from genlm_llamacpp.populations import HeldRows, held_rows
from genlm_llamacpp.sequences import Sequences
from genlm_llamacpp.vocabulary import GgufTokenizer, read_vocabulary

__all__ = ["LlamaCppEngine"]

_DEMO = Path(__file__).parent / "demo.gguf"

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")

_MOST_OUTPUT_BYTES = 128 * 2**20
"""Maximum size of the logits of one call: 256 rows of 128,000."""

_MOST_NEW_TOKENS = 32
"""Maximum number of new tokens of a row of a population. Rows with more are computed as single
requests, which share the computation of common prefixes."""


class LlamaCppEngine(BatchEngine):
    """Next-token rows of a GGUF file. Rows are on the CPU.

    Options are llama.cpp's, under its names.

    Args:
        model: `"demo"` (a small packaged model), a GGUF file, the first file of a split one,
            or a folder with one of them.
        n_ctx: Cells of the cache of keys and values, one for each token, shared by all
            sequences, or divided among them with `kv_unified=False`; by default 16,384, or as
            many as fit into a quarter of the free memory.
        n_batch: Maximum number of tokens in one call of llama.cpp.
        n_ubatch: Maximum number of tokens that it computes at once.
        n_seq_max: Maximum number of cached sequences, at most 256.
        kv_unified: Whether sequences share cells: less work for those that begin alike, more
            for those that share little. By default they do, except that while nothing else is
            held, four or more that share little each get a part of the cells.
        type_k: Type of cached keys, such as `"f16"` or `"q8_0"`; by default `"f32"` for float32
            files and `"f16"` for others.
        type_v: Type of cached values, as `type_k`.
        flash_attn: Whether to compute attention by llama.cpp's flash attention, which rounds to
            float16 on the CPU.
        offload_kqv: Whether the cache is on the GPU.
        threads: Threads that compute; by default as many as torch uses.
        threads_batch: Threads for batches of several tokens; by default as `threads`.
        n_gpu_layers: Layers on the GPU; -1 for all. Without effect where llama.cpp was built
            for the CPU.
        split_mode: How several GPUs share the model: `"none"`, `"layer"` or `"row"`.
        main_gpu: The GPU with `split_mode="none"`.
        tensor_split: Share of each GPU.
        check_tensors: Whether to check the weights for invalid values when the model is loaded.
        max_context: Maximum length of a context, if shorter than the model's.

    Raises:
        ModelLoadError: llama.cpp cannot load the file, or created another context than
            requested.
        VocabularyError: The file's tokens do not have exact bytes.
        ValueError: An option out of its range.
    """

    backend = "llamacpp"
    capabilities = frozenset({Capability.LORA, Capability.PREFIX_CACHE, Capability.SCORE})

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 256,
        kv_unified: bool | None = None,
        type_k: str | None = None,
        type_v: str | None = None,
        flash_attn: bool = False,
        offload_kqv: bool = True,
        threads: int | None = None,
        threads_batch: int | None = None,
        n_gpu_layers: int = -1,
        split_mode: str = "layer",
        main_gpu: int = 0,
        tensor_split: Sequence[float] = (),
        check_tensors: bool = False,
        max_context: int | None = None,
    ) -> None:
        if kv_unified not in (None, True, False):
            raise ValueError(f"kv_unified={kv_unified!r}; expected True, False or None")
        threads = torch.get_num_threads() if threads is None else threads
        options = ContextOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            kv_unified=kv_unified is not False,
            type_k=type_k,
            type_v=type_v,
            flash_attn=flash_attn,
            offload_kqv=offload_kqv,
            threads=threads,
            threads_batch=threads if threads_batch is None else threads_batch,
            n_gpu_layers=n_gpu_layers,
            split_mode=split_mode,
            main_gpu=main_gpu,
            tensor_split=tuple(tensor_split),
            check_tensors=check_tensors,
        )
        _check_options(options, max_context)
        file = model_file(model)
        self.vocabulary = read_vocabulary(GgufTokenizer(file))
        self._context = LlamaContext(file, options)
        self._adapters = Adapters(self._context)
        self.max_context = self._context.max_context
        if max_context is not None:
            self.max_context = min(max_context, self.max_context)
        self._sequences = Sequences(self._context, n_seq_max)
        self._n_cells, self._n_seq_max = self._context.n_cells, n_seq_max
        self._most_outputs = max(1, _MOST_OUTPUT_BYTES // (4 * self._context.n_logits))
        self._description = self._context.description()
        self._may_divide = kv_unified is None and self._context.can_divide
        self._considered: Sequence[Query] = ()
        self._tokens_evaluated = self._tokens_computed = self._forwards = 0

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Accept a query for one of the next steps.

        Raises:
            UnknownAdapterError: Its adapter was not loaded.
        """
        check_query(query, adapters=self._adapters.names)
        super().submit(query)

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        """Choose about one batch: the oldest query and others of its adapter and kind."""
        first = pending[0]
        self._considered = [query for query in pending if query.adapter == first.adapter]
        scored = bool(first.targets)
        most = min(self._sequences.most_requests, self._most_outputs)
        chosen: list[Query] = []
        room = self._context.n_batch
        for query in pending:
            if query.adapter != first.adapter or bool(query.targets) != scored:
                continue
            is_step = not scored and self._sequences.is_next(query.adapter, query.sequence)
            room -= 1 if is_step else len(query)
            if chosen and room < 0:
                break
            chosen.append(query)
            if len(chosen) == most:
                break
        return chosen

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        """Compute the row of each query; all have the same adapter.

        Returns:
            Shape `(len(queries), vocabulary.size)`, float32.
        """
        self._prepare(queries)
        count = len(queries)
        logits = Logits(count, self._context.n_logits)
        sequences = [query.sequence for query in queries]
        lasts = np.array([len(sequence) - 1 for sequence in sequences])
        self._compute(queries[0].adapter, sequences, lasts, logits, np.arange(count))
        return rows_from_logits(torch.from_numpy(logits.values), self.vocabulary)

    def reduce_texts(self, queries: Sequence[Query]) -> Sequence[Any]:
        """Score the targets of queries of one adapter, or reduce the rows before them."""
        self._prepare(queries)
        texts = [ScoredText.of(query) for query in queries]
        scores = PieceScores(texts, self.vocabulary)
        sequences = [text.sequence for text in texts]
        firsts = np.array([text.first for text in texts])
        self._compute(queries[0].adapter, sequences, firsts, scores, scores.ends[:-1])
        return scores.results()

    score = reduce_texts

    def submit_group(self, group: GroupQuery) -> None:
        """Accept the query of a population.

        Raises:
            UnknownAdapterError: Its adapter was not loaded.
        """
        if group.adapter is not None:
            self._adapters.check_loaded(group.adapter)
        super().submit_group(group)

    def group_limit(self, group: GroupQuery) -> int:  # noqa: ARG002
        """Return the maximum number of a population's sequences computed at once."""
        return min(self._sequences.most_requests, self._most_outputs)

    def evaluate_group(self, group: GroupQuery, places: Integers) -> GroupValues:
        """Compute sequences of a population: each continues, or copies, that of its parent.

        Sequences that llama.cpp does not hold are computed as requests.
        """
        if not self._context.can_cut:  # a recurrent state cannot be rolled back
            return super().evaluate_group(group, places)
        lineage, wanted = group.generation.lineage, group.wanted[places]
        lengths = lineage.lengths[wanted]
        self._sequences.collect()
        self._arrange(
            len(group.wanted),
            int(lengths.max()),
            map(lineage.sequence, group.wanted.tolist()),
        )
        held = held_rows(group, self._sequences)
        starts = np.minimum(held.lengths[wanted], lengths - 1)
        found = held.can_continue(wanted, starts)
        found = found[lengths[found] - starts[found] <= _MOST_NEW_TOKENS]
        logits = Logits(len(wanted), self._context.n_logits)
        if not len(found) or not self._continue(group, held, wanted, found, logits):
            found = found[:0]
        others = np.delete(np.arange(len(wanted)), found)
        if len(others):
            sequences = [lineage.sequence(row) for row in wanted[others].tolist()]
            numbers, versions = self._compute(
                group.adapter, sequences, lengths[others] - 1, logits, others, marked=False
            )
            held.set(wanted[others], numbers, versions, lengths[others])
        return GroupValues(torch.from_numpy(logits.values), are_logits=True)

    def _continue(
        self,
        group: GroupQuery,
        held: HeldRows,
        wanted: Integers,
        found: Integers,
        logits: Logits,
    ) -> bool:
        """Compute the tokens after the cached prefixes of some sequences, in one batch.

        Args:
            group: The population.
            held: The sequences of llama.cpp that hold its members.
            wanted: Sequences of the population.
            found: Indices of the sequences to compute.
            logits: Takes their logits.

        Returns:
            False if there is no room for them; only evictions have changed the state.
        """
        lineage, own = group.generation.lineage, wanted[found]
        lengths, common = lineage.lengths[own], held.lengths[own]
        starts = np.minimum(common, lengths - 1)
        counts = lengths - starts
        tokens = lineage.last_tokens(own, counts)
        rows = Extensions(
            held.numbers[own], starts, common, tokens[tokens >= 0], counts, lengths - 1
        )
        if not self._run(group.adapter, rows, logits, found):
            return False
        held.set(own, rows.numbers, self._sequences.versions(rows.numbers), lengths)
        return True

    def close(self) -> None:
        """Free weights and cache; the tokenizer remains usable."""
        self._context.close()

    # -- caches -----------------------------------------------------------------------

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and keep it until `clear_prefix_cache`.

        Raises:
            EvaluationError: It does not fit, or no sequence would remain for others.
            UnknownAdapterError: The adapter was not loaded.
        """
        query = Query(0, tuple(token_ids), adapter)
        check_query(query, adapters=self._adapters.names)
        if self._context.parts:  # sequences share the prefix that they continue
            self._divide(0)
        self.evaluate([query])
        if not self._sequences.pin(adapter, query.sequence):
            raise EvaluationError(
                f"asked to keep a prefix of {len(query)} tokens; {self._sequences.pinned} are "
                f"kept, and no sequence would remain for others. Raise n_seq_max, or call "
                f"clear_kv_cache"
            )

    def clear_prefix_cache(self) -> None:
        """Free everything computed, kept prefixes included. Rows do not change."""
        self._sequences.clear(all_adapters=True)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Remove the sequence of a context without references."""
        self._sequences.release(adapter, key)

    # -- adapters ---------------------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter: a GGUF file, or a folder with one.

        Raises:
            AdapterError: The name is taken, there is no such file, or it does not fit the
                model.
        """
        self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Free an adapter and the sequences computed with it.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        self._adapters.check_loaded(name)
        self._sequences.clear(name)
        self._adapters.remove(name)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of work, of sequences, and facts about the model.

        `tokens_evaluated` counts the tokens of all contexts, `tokens_computed` those that
        went through the model.
        """
        return {
            "tokens_evaluated": self._tokens_evaluated,
            "tokens_computed": self._tokens_computed,
            "forwards": self._forwards,
            "sequences": self._sequences.used,
            "sequences_evicted": self._sequences.evicted,
            "kv_cells": self._context.n_cells,
            "model": self._description,
        }

    # -- computation ------------------------------------------------------------------

    def _prepare(self, queries: Sequence[Query]) -> None:
        """Free dropped sequences, and arrange the cache for the queries of a step.

        Pending queries of the same adapter are considered too.
        """
        self._sequences.collect()
        waiting, self._considered = self._considered or queries, ()
        sequences = [query.sequence for query in waiting]
        self._arrange(len(sequences), max(map(len, sequences)), sequences)

    def _arrange(self, count: int, longest: int, sequences: Iterable[TokenSequence]) -> None:
        """Divide an empty cache among sequences with few common tokens.

        A divided cache is shared again when sequences outnumber or outgrow its parts.

        Args:
            count: Number of sequences.
            longest: Length of the longest.
            sequences: The sequences; read only if the cache is empty.
        """
        if not self._may_divide:
            return
        parts = self._context.parts
        if self._sequences.used:
            if parts and (count > parts or longest > self._context.max_context):
                self._divide(0)
            return
        token_ids = [sequence.token_ids for sequence in sequences]
        wanted = parts_for(token_ids, self._n_cells, self._n_seq_max)
        if wanted != parts or not self._context.is_open:
            self._divide(wanted)

    def _divide(self, parts: int) -> None:
        evicted = self._sequences.used + self._sequences.evicted
        try:
            self._context.divide(parts)
        finally:
            self._sequences = Sequences(self._context, self._context.parts or self._n_seq_max)
            self._sequences.evicted = evicted

    def _compute(
        self,
        adapter: str | None,
        sequences: Sequence[TokenSequence],
        firsts: Integers,
        receiver: Logits | PieceScores,
        members: Integers,
        *,
        marked: bool = True,
    ) -> Integers:
        """Compute sequences in one batch, or in halves if there is no room for it.

        Args:
            adapter: Adapter of all.
            sequences: At least one sequence.
            firsts: First position of each whose logits are requested; those of all later ones
                are requested too.
            receiver: Takes the logits.
            members: The receiver's number of the first requested logits of each; the numbers of
                the others follow it.
            marked: Whether the sequences are indexed by their keys.

        Returns:
            The number of llama.cpp's sequence that held each after its batch, and the version
            of that sequence at that time, shape `(2, len(sequences))`.
        """
        rows = self._sequences.find(adapter, sequences, firsts)
        if self._run(adapter, rows, receiver, members):
            if marked:
                self._sequences.mark(adapter, rows.numbers, sequences)
            return np.stack([rows.numbers, self._sequences.versions(rows.numbers)])
        middle = len(sequences) // 2
        parts = [slice(middle), slice(middle, None)]
        if not middle:
            if not self._sequences.drop_pinned():
                raise EvaluationError(
                    f"a context of {len(sequences[0])} tokens does not fit into a cache of "
                    f"{self._context.n_cells} cells; raise n_ctx"
                )
            parts = [slice(None)]
        found = [
            self._compute(
                adapter, sequences[part], firsts[part], receiver, members[part], marked=marked
            )
            for part in parts
        ]
        return np.concatenate(found, axis=1)

    def _run(
        self,
        adapter: str | None,
        rows: Extensions,
        receiver: Logits | PieceScores,
        members: Integers,
    ) -> bool:
        """Compute the uncached tokens of sequences in one batch.

        Args:
            adapter: Adapter of all.
            rows: The sequences and their tokens.
            receiver: Takes the logits.
            members: As in `_compute`.

        Returns:
            False if there is no room for them; only evictions have changed the state.
        """
        if not self._sequences.claim(rows):
            return False
        try:
            self._adapters.activate(adapter)
            batch = build_batch(rows, shared=self._context.shares_tokens)
            receiver.expect(batch.results, ranges(members, rows.lengths - rows.firsts))
            self._decode(batch, receiver)
        except BaseException as error:
            self._sequences.roll_back(rows)
            if isinstance(error, CacheFullError):
                return False
            raise
        self._sequences.commit(adapter, rows)
        self._tokens_evaluated += int(rows.lengths.sum())
        return True

    def _decode(self, batch: TokenBatch, receiver: Logits | PieceScores) -> None:
        for part in batch.parts(self._context.n_batch, self._most_outputs):
            while True:
                try:
                    logits = self._context.decode(batch, part)
                    break
                except CacheFullError:
                    if not self._sequences.make_room():
                        raise
            self._forwards += 1
            self._tokens_computed += part.end - part.first
            if len(part.outputs):
                receiver.add(part.outputs, torch.from_numpy(logits))


def model_file(model: str | os.PathLike[str]) -> Path:
    """Return the GGUF file of a model, the first one if it is split.

    Raises:
        ModelLoadError: There is no GGUF file, or the choice is ambiguous.
    """
    if model == "demo":
        return _DEMO
    path = Path(model_source(model))
    if not path.exists():
        raise ModelLoadError(
            f"asked for the model {str(model)!r}; pass a GGUF file, or a folder with one. "
            f"Nothing is downloaded here: fetch it first, for example with "
            f"huggingface_hub.hf_hub_download"
        )
    if not path.is_dir():
        return path
    found = [file for file in sorted(path.glob("*.gguf")) if not _LATER_PART.search(file.name)]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ModelLoadError(
            f"folder {str(path)!r} has {len(found)} GGUF models ({names}); pass one of the "
            f"files"
        )
    return found[0]


def _check_options(options: ContextOptions, max_context: int | None) -> None:
    counts = ("n_batch", "n_ubatch", "n_seq_max", "threads", "threads_batch")
    least = {name: getattr(options, name) for name in counts}
    least |= {"n_ctx": options.n_ctx, "max_context": max_context}
    for name, value in least.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}; it must be 1 or more")
    if options.n_seq_max > 256:
        raise ValueError(f"n_seq_max={options.n_seq_max}; llama.cpp has at most 256 sequences")
    for name in ("type_k", "type_v"):
        value = getattr(options, name)
        if value is not None and value not in CACHE_TYPES:
            raise ValueError(f"{name}={value!r}; expected one of {', '.join(CACHE_TYPES)}")
    if options.split_mode not in {"none", "layer", "row"}:
        raise ValueError(f"split_mode={options.split_mode!r}; expected none, layer or row")
