"""`LlamaCppEngine`: GGUF files on llama.cpp as a genlm engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from genlm.plugin import (
    BatchEngine,
    Capability,
    Count,
    EvaluationError,
    GroupQuery,
    GroupValues,
    Query,
    TokenSequence,
    check_query,
    ranges,
)
from genlm.prefix import PieceScores
from genlm_llamacpp.adapters import Adapters
from genlm_llamacpp.batch import (
    Extensions,
    Integers,
    Logits,
    TokenBatch,
    build_batch,
)
from genlm_llamacpp.context import CacheFullError, ContextOptions, LlamaContext
from genlm_llamacpp.division import CacheDivision
from genlm_llamacpp.files import model_file
from genlm_llamacpp.populations import Populations
from genlm_llamacpp.sequences import Sequences
from genlm_llamacpp.vocabulary import GgufTokenizer, read_vocabulary

_MAX_OUTPUT_BYTES = 128 * 2**20
"""Maximum size of the logits of one call, such as 256 rows of 128,000 float32."""


class LlamaCppEngine(BatchEngine):
    """Engine for GGUF files on llama.cpp. Rows are on the CPU.

    Options have llama.cpp's names and meanings.

    Args:
        model: `"demo"` (a small packaged model), a GGUF file, the first file of a split model,
            or a folder with one of them.
        n_ctx: Number of cells of the cache, one per token, which all sequences share, or which
            are divided among them with `kv_unified=False`; by default 16,384, or as many as
            fit into a quarter of the free memory.
        n_batch: Maximum number of tokens in one call of llama.cpp; with sliding windows at most
            `n_ubatch`.
        n_ubatch: Maximum number of tokens in one forward pass.
        n_seq_max: Maximum number of cached sequences, at most 256.
        kv_unified: Whether sequences share cells, which is faster for sequences with long
            common prefixes and slower for others. By default they share cells, except that four
            or more sequences with short common prefixes divide an empty cache.
        type_k: Type of cached keys, such as `"f16"` or `"q8_0"`; by default `"f32"` for float32
            files and `"f16"` for others.
        type_v: Type of cached values, as `type_k`.
        flash_attn: Whether to compute attention by llama.cpp's flash attention, which rounds to
            float16 on the CPU.
        offload_kqv: Whether the cache is on the GPU.
        threads: Number of threads; by default as many as torch uses.
        threads_batch: Number of threads for batches of several tokens; by default `threads`.
        n_gpu_layers: Number of layers on the GPU; -1 for all. It has no effect if llama.cpp was
            built for the CPU.
        split_mode: How several GPUs share the model: `"none"`, `"layer"` or `"row"`.
        main_gpu: The GPU with `split_mode="none"`.
        tensor_split: Share of each GPU.
        check_tensors: Whether to check the weights for invalid values when the model is loaded.
        max_context: Maximum length of a context, if shorter than the model's.

    Raises:
        ModelLoadError: llama.cpp cannot load the file, or created a context with other
            parameters.
        VocabularyError: The bytes of a token are unknown.
        ValueError: An option is out of its range.
        TypeError: An option is of another type.
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
        if flash_attn not in (True, False):  # llama.cpp aborts on other numbers
            raise ValueError(f"flash_attn={flash_attn!r}; expected True or False")
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
            tensor_split=tensor_split,
            check_tensors=check_tensors,
            max_context=max_context,
        )
        file = model_file(model)
        self.vocabulary = read_vocabulary(GgufTokenizer(file))
        self._context = LlamaContext(file, options)
        self._adapters = Adapters(self._context)
        self.max_context = self._context.max_context
        self._sequences = Sequences(self._context)
        self._max_outputs = max(1, _MAX_OUTPUT_BYTES // (4 * self._context.n_logits))
        self._populations = Populations(self._sequences, self._max_outputs)
        self._description = self._context.description()
        self._division = CacheDivision(
            self._context, self._sequences, is_automatic=kv_unified is None
        )
        self._expected: Sequence[TokenSequence] = ()  # sequences of the step, see `_prepare`
        self._tokens_evaluated = self._tokens_computed = self._forwards = 0

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Accept a query for one of the next steps.

        Raises:
            UnknownAdapterError: The adapter is not loaded.
        """
        check_query(query, adapters=self._adapters.names)
        super().submit(query)

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        """Choose about one batch: the first query and others with its adapter and kind."""
        first = pending[0]
        self._expected = [q.sequence for q in pending if q.adapter == first.adapter]
        has_targets = bool(first.targets)
        limit = min(self._sequences.max_requests, self._max_outputs)
        batch: list[Query] = []
        room = self._context.n_batch
        for query in pending:
            if query.adapter != first.adapter or bool(query.targets) != has_targets:
                continue
            is_step = not has_targets and self._sequences.is_next(query.adapter, query.sequence)
            room -= 1 if is_step else len(query)
            if batch and room < 0:
                break
            batch.append(query)
            if len(batch) == limit:
                break
        return batch

    def evaluate(self, queries: Sequence[Query]) -> GroupValues:
        """Compute the logits of queries of one adapter; see `BatchEngine.evaluate`."""
        self._prepare(queries)
        sequences = [query.sequence for query in queries]
        logits = Logits(len(sequences), self._context.n_logits)
        lasts = np.array([len(sequence) - 1 for sequence in sequences])
        self._compute(queries[0].adapter, sequences, lasts, logits, np.arange(len(sequences)))
        return GroupValues(torch.from_numpy(logits.values), are_logits=True)

    def score(self, queries: Sequence[Query]) -> Sequence[Any]:
        """Score or reduce texts of one adapter; see `BatchEngine.score`."""
        self._prepare(queries)
        scores = PieceScores(queries, self.vocabulary)
        sequences = [query.sequence for query in queries]
        firsts = np.array([query.first_target for query in queries])
        self._compute(queries[0].adapter, sequences, firsts, scores, scores.ends[:-1])
        return scores.results()

    def submit_group(self, group: GroupQuery) -> None:
        """Accept the query of a population.

        Raises:
            UnknownAdapterError: The adapter is not loaded.
        """
        self._adapters.check_loaded(group.adapter)
        super().submit_group(group)

    def group_limit(self, group: GroupQuery) -> int:  # noqa: ARG002
        """Return the maximum number of a population's sequences computed at once."""
        return self._max_outputs

    def choose_groups(self, pending: Sequence[GroupQuery]) -> Sequence[GroupQuery]:
        """Choose populations whose sequences are cached or fit into the cache together.

        A divided cache, which is shared when they do not fit, is no limit.
        """
        if self._context.parts:
            return super().choose_groups(pending)
        return self._populations.choose(pending)

    def defers(self, pending: Sequence[GroupQuery]) -> bool:
        """Whether populations wait because the sequences of others would be evicted."""
        return not self._context.parts and self._populations.defers(pending)

    def evaluate_groups(self, parts: Sequence[tuple[GroupQuery, Integers]]) -> GroupValues:
        """Compute members of populations, which continue or copy their parents' sequences."""
        members = [
            sequence
            for group, _ in parts
            for sequence in group.generation.lineage.sequences(group.wanted)
        ]
        self._expected = members
        values = super().evaluate_groups(parts)
        keys = [member.key for member in members]
        self._sequences.assign_to_populations(parts[0][0].adapter, keys)
        return values

    def close(self) -> None:
        """Free weights and cache; the tokenizer remains usable."""
        self._context.close()

    # -- caches -----------------------------------------------------------------------

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and pin it until `clear_prefix_cache`.

        Raises:
            EvaluationError: The prefix does not fit, or no sequence would remain for others.
            UnknownAdapterError: The adapter is not loaded.
        """
        query = Query(0, tuple(token_ids), adapter)
        check_query(query, adapters=self._adapters.names)
        self._division.share()  # sequences then share the prefix that they continue
        self.evaluate([query])
        if not self._sequences.pin(adapter, query.sequence):
            raise EvaluationError(
                f"a prefix of {len(query)} tokens cannot be pinned: {self._sequences.pinned} "
                f"are pinned, and no sequence would remain for other requests. Raise "
                f"n_seq_max, or call clear_kv_cache"
            )

    def clear_prefix_cache(self) -> None:
        """Free all cached sequences, pinned prefixes included. Rows do not change."""
        self._sequences.clear(all_adapters=True)

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """Free the cached tokens of a context without references."""
        self._sequences.release(adapter, key)

    # -- adapters ---------------------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter: a GGUF file, or a folder with one.

        Raises:
            AdapterError: The name is in use, the file does not exist, or it does not fit the
                model.
        """
        self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Free an adapter and the sequences computed with it.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        self._sequences.clear(name)
        self._adapters.remove(name)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counts of tokens and sequences, and the description of the model.

        `tokens_evaluated` counts the tokens of all contexts, `tokens_computed` the tokens of
        all forward passes.
        """
        return {
            "tokens_evaluated": Count(self._tokens_evaluated),
            "tokens_computed": Count(self._tokens_computed),
            "forwards": Count(self._forwards),
            "sequences": self._sequences.used,
            "sequences_evicted": Count(self._sequences.evicted),
            "kv_cells": self._context.n_cells,
            "model": self._description,
        }

    # -- computation ------------------------------------------------------------------

    def _prepare(self, queries: Sequence[Query]) -> None:
        """Divide or share the cache for the sequences of a step.

        These are all pending queries of an adapter, or all requested members of populations, of
        which `queries` may be a part.
        """
        expected, self._expected = self._expected, ()
        self._division.adapt(expected or [query.sequence for query in queries])

    def _compute(
        self,
        adapter: str | None,
        sequences: Sequence[TokenSequence],
        firsts: Integers,
        receiver: Logits | PieceScores,
        members: Integers,
    ) -> None:
        """Compute sequences in one batch, or in halves if there is no room for it.

        The half with fewer uncached tokens is computed first: the other one may evict sequences
        that it continues.

        Args:
            adapter: Adapter of all sequences.
            sequences: At least one sequence.
            firsts: First position of each sequence whose logits are requested; those of all
                later positions are requested too.
            receiver: Receives the logits.
            members: The receiver's index of the first of these logits; later ones follow it.
        """
        rows = self._sequences.find(adapter, sequences, firsts)
        are_texts = isinstance(receiver, PieceScores)
        if are_texts:
            self._sequences.remove_prompts(rows)
        if self._run(adapter, rows, receiver, members):
            self._sequences.commit(adapter, rows, sequences, are_texts=are_texts)
            return
        order = np.argsort(rows.counts, kind="stable")
        middle = len(sequences) // 2
        parts = [order[:middle], order[middle:]]
        if not middle:
            if not self._sequences.drop_pinned():
                raise EvaluationError(
                    f"a context of {len(sequences[0])} tokens does not fit into a cache of "
                    f"{self._context.n_cells} cells; raise n_ctx"
                )
            parts = [order]
        for part in parts:
            half = [sequences[place] for place in part.tolist()]
            self._compute(adapter, half, firsts[part], receiver, members[part])

    def _run(
        self,
        adapter: str | None,
        rows: Extensions,
        receiver: Logits | PieceScores,
        members: Integers,
    ) -> bool:
        """Compute rows in one batch; see `_compute`.

        Returns:
            False if there is no room for them; then sequences may have been evicted.
        """
        if not self._sequences.claim(rows):
            return False
        try:
            self._adapters.activate(adapter)
            batch = build_batch(rows, shared=self._context.shares_tokens)
            receiver.expect(batch.results, ranges(members, rows.lengths - rows.firsts))
            separately = self._context.separates_sequences and rows.counts.max() > 1
            self._decode(batch, receiver, separately=bool(separately))
        except BaseException as error:
            self._sequences.roll_back(rows)
            if isinstance(error, CacheFullError):
                return False
            raise
        self._tokens_evaluated += int(rows.lengths.sum())
        return True

    def _decode(
        self, batch: TokenBatch, receiver: Logits | PieceScores, *, separately: bool
    ) -> None:
        parts = batch.parts(self._context.n_batch, self._max_outputs, separately=separately)
        for part in parts:
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
