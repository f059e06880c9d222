"""`VLLMEngine`: vLLM as a genlm engine.

The engine adds queries to vLLM's scheduler, which lets them join the running batch, and
collects finished requests: those of single queries (`query_requests`) and those of populations
(`populations`). `genlm_vllm.capture` makes the rows inside vLLM; a row is used only once vLLM
has sampled the token after it. `docs/vllm-engine.md` follows a step through the modules.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from genlm import EngineDiedError
from genlm.plugin import (
    AdapterError,
    Capability,
    Completion,
    GroupQuery,
    ModelFacts,
    Query,
    UnsupportedCapabilityError,
    Vocabulary,
    check_query,
    claim_process,
    preserve_process_state,
    release_process,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.lifecycle import load_vllm, shut_down
from genlm_vllm.loading import adapter_capacity, checked_options, needs_processes
from genlm_vllm.model_checks import check_served
from genlm_vllm.populations import RunningPopulations
from genlm_vllm.process_state import Accelerator
from genlm_vllm.processes import FailureLog, ProcessMonitor
from genlm_vllm.query_requests import QueryRequests
from genlm_vllm.requests import LocalRows, RemoteRows
from genlm_vllm.running_requests import obstacle as obstacle_to_running
from genlm_vllm.worker import call_workers

__all__ = ["VLLMEngine"]

_PREFIX_ID = -1
"""Query id of a prefix to cache; those of the scheduler begin at 0."""

_LORA_HINT = "load the model with engine_opts={'enable_lora': True}"


class VLLMEngine:
    """Next-token rows and continuations of a model that vLLM serves.

    Args:
        model: A folder or a hub id.
        engine_opts: Arguments of `vllm.EngineArgs`, under vLLM's names.
        multiprocess: Whether vLLM computes in processes of its own. By default it does if
            `engine_opts` request several workers or an executor such as Ray.
        unverified: `"warn"` or `"refuse"` a model of a family whose rows were not compared with
            an unbatched forward pass.
        keep_contexts: Whether the requests of row queries stay in vLLM between steps, so that a
            context that grows costs one token. Without effect where vLLM cannot keep them.

    Raises:
        MissingRequirementError: vLLM is not installed, or its version is not supported.
        ModelLoadError: vLLM cannot serve the model or would compute wrong rows, the family is
            unverified and `unverified="refuse"`, or another engine computes in this process.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: An option that would make rows wrong, or another value of `unverified`.
        TypeError: An option that vLLM does not have, or an option of the wrong type.

    Warns:
        UnverifiedModelWarning: The family is unverified.
    """

    capability_hints: Mapping[Capability, str] = {Capability.LORA: _LORA_HINT}
    _final_statistics: Mapping[str, int | float | str] | None = None
    _death: EngineDiedError | None = None

    option_homes: ClassVar[Mapping[str, str]] = {"": "engine_opts"}

    submit_group: Callable[[GroupQuery], None] | None = None
    """Accepts the query of a population; None where vLLM cannot keep its requests running, and
    each distinct sequence is a separate query."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine_opts: Mapping[str, Any] | None = None,
        multiprocess: bool | None = None,
        unverified: str = "warn",
        keep_contexts: bool = True,
    ) -> None:
        options = checked_options(engine_opts)
        if multiprocess not in {None, True, False}:
            raise TypeError(f"multiprocess={multiprocess!r}; expected True, False or None")
        self._multiprocess = needs_processes(options) if multiprocess is None else multiprocess
        if not self._multiprocess:
            if needs_processes(options):
                raise ValueError(
                    f"multiprocess=False contradicts engine_opts={options}: several workers "
                    f"need processes of their own"
                )
            claim_process(
                self, "vLLM", "load with multiprocess=True, which computes in other processes"
            )
        self._accelerator = None if self._multiprocess else Accelerator()
        self._failures = FailureLog() if self._multiprocess else None
        try:
            self._vllm, facts = load_vllm(model, options, failures=self._failures)
            try:
                self._initialize(facts, unverified)
                self.keeps_contexts = keep_contexts
            except BaseException:
                shut_down(self._vllm, multiprocess=self._multiprocess)
                raise
        except BaseException:
            self._release()
            raise

    def _initialize(self, facts: ModelFacts, unverified: str) -> None:
        engine, config = self._vllm, self._vllm.vllm_config
        built = call_workers(engine, "genlm_describe_model")
        check_served(config, facts, built, unverified=unverified)
        self._implementation = built[0]["model"]
        self.vocabulary = Vocabulary.from_tokenizer(engine.get_tokenizer())
        # vLLM must generate one token.
        self.max_context: int = config.model_config.max_model_len - 1
        embedded_ids = config.model_config.get_vocab_size()
        capacity = adapter_capacity(engine)
        self._adapters = Adapters(engine, capacity)
        caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        scores = all(call_workers(engine, "genlm_start_scores"))
        self.capabilities = frozenset(
            {Capability.SAMPLE}
            | ({Capability.LORA} if capacity else set())
            | ({Capability.PREFIX_CACHE} if caches_prefixes else set())
            | ({Capability.SCORE} if scores else set())
        )
        failures = self._failures
        self._monitor = None if failures is None else ProcessMonitor(engine, failures)
        rows = RemoteRows if self._multiprocess else LocalRows
        self._rows = rows(engine, self.vocabulary)
        check = _query_check(
            self._adapters, embedded_ids, self.max_context, self.vocabulary.size
        )
        self._ready: list[Completion] = []
        self._populations: RunningPopulations | None = None
        self._populations_obstacle = obstacle_to_running(engine)
        if self._populations_obstacle is None:
            self._populations = RunningPopulations(
                engine,
                self._adapters,
                vocabulary=self.vocabulary,
                check=check,
                embedded_ids=embedded_ids,
            )
            self.submit_group = self._populations.submit
        self._requests = QueryRequests(
            engine,
            adapters=self._adapters,
            rows=self._rows,
            check=check,
            max_context=self.max_context,
            embedded_ids=embedded_ids,
            populations=self._populations,
        )
        self._tokens_evaluated = self._steps = 0

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Add a query to the running batch.

        Raises:
            GenlmError: As `genlm.plugin.check_query`.
            EngineDiedError: A process of vLLM has ended.
        """
        with self._guarding():
            self._requests.submit(query)
        self._tokens_evaluated += len(query)

    def step(self) -> list[Completion]:
        """Run one step of vLLM and return the finished queries."""
        ready, self._ready = self._ready, []
        return ready or self._advance()

    def abort(self, query_id: int) -> None:
        """Remove a query from the running batch."""
        if self._populations is None or not self._populations.abort(query_id):
            self._requests.abort(query_id)

    def _advance(self) -> list[Completion]:
        with self._guarding():
            return self._requests.send() + self._advance_vllm()

    def _is_busy(self) -> bool:
        populations = self._populations
        waits = populations is not None and populations.unanswered
        return bool(self._requests.unanswered or waits)

    def _guarding(self) -> contextlib.AbstractContextManager[None]:
        """Raise `EngineDiedError` for errors that follow from the end of a process."""
        if self._death is not None:
            raise EngineDiedError(*self._death.args)
        return contextlib.nullcontext() if self._monitor is None else self._monitor.guarding()

    def _advance_vllm(self) -> list[Completion]:
        populations = self._populations
        if not self._is_busy():
            return []
        if populations is not None:
            populations.prepare()
        try:
            self._vllm.step()
        except Exception as error:
            if self._multiprocess:  # vLLM's process has ended or was not disturbed
                raise
            return self._fail_all(error)
        self._steps += 1
        completions = self._requests.collect()
        if populations is not None:
            completions += populations.collect()
        completions += self._requests.relieve()
        if populations is not None:
            populations.relieve(self._requests.end_oldest)
        return completions

    def _fail_all(self, error: Exception) -> list[Completion]:
        """Fail every query after a step of this process that raised.

        vLLM counts the tokens of that step as computed, in its prefix cache too.

        Raises:
            EngineDiedError: vLLM cannot forget them.
        """
        failed = [query.query_id for query in self._requests.queries()]
        for query_id in failed:
            self._requests.abort(query_id)
        if self._populations is not None:
            failed += self._populations.drop_all()
        self._end_resting()
        if not self._vllm.reset_prefix_cache():
            self._death = EngineDiedError(
                f"a step of vLLM raised {type(error).__name__}: {error}; vLLM cannot forget "
                f"its tokens. Load the model again"
            )
            raise self._death from error
        return [Completion(query_id, error=error) for query_id in failed]

    # -- resident contexts ------------------------------------------------------------

    @property
    def keeps_contexts(self) -> bool:
        """Whether requests of row queries stay in vLLM; may be set between steps."""
        return self._requests.keeps

    @keeps_contexts.setter
    def keeps_contexts(self, keeps: bool) -> None:
        self._requests.keeps = keeps
        if self._populations is not None:
            self._populations.keeps = keeps
            if not keeps:
                self._populations.end_resting()

    def _end_resting(self) -> None:
        """End the resident requests that compute nothing."""
        self._requests.end_idle()
        if self._populations is not None:
            self._populations.end_resting()

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """End the idle request of a context; its full KV blocks stay in the prefix cache.

        Args:
            adapter: The context's adapter.
            key: `TokenSequence.key` of its ids.
        """
        self._requests.release(adapter, key)

    # -- prefixes, adapters -----------------------------------------------------------

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix, which puts its full blocks into vLLM's prefix cache.

        vLLM evicts the least recently used blocks when it needs memory.

        Raises:
            UnsupportedCapabilityError: The model was loaded without prefix caching.
            GenlmError: As `submit`.
        """
        if Capability.PREFIX_CACHE not in self.capabilities:
            raise UnsupportedCapabilityError(Capability.PREFIX_CACHE, "vllm")
        own: list[Completion] = []
        self.submit(Query(_PREFIX_ID, tuple(token_ids), adapter, outputs=()))
        try:
            while not own:
                for completion in self._advance():
                    # Queries that finish meanwhile are returned by the next step.
                    is_own = completion.query_id == _PREFIX_ID
                    (own if is_own else self._ready).append(completion)
        finally:
            self.abort(_PREFIX_ID)
        if own[0].error is not None:
            raise own[0].error

    def clear_prefix_cache(self) -> None:
        """Free all cached prefixes, after all running queries. Results do not change."""
        if Capability.PREFIX_CACHE not in self.capabilities:
            raise UnsupportedCapabilityError(Capability.PREFIX_CACHE, "vllm")
        while self._is_busy():  # vLLM clears nothing while requests hold blocks
            self._ready += self._advance()
        with self._guarding():
            self._end_resting()
            self._vllm.reset_prefix_cache()

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`.

        Raises:
            AdapterError: The name is taken, the folder holds no adapter that vLLM serves
                with this model, or the model was loaded for no or fewer adapters.
        """
        if Capability.LORA not in self.capabilities:
            raise AdapterError(
                f"asked for adapter {name!r} of a model without LoRA; {_LORA_HINT}"
            )
        with preserve_process_state(), self._guarding():
            self._adapters.load(name, path)
            if self._populations is not None:
                self._populations.end_too_many()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from every worker, which makes room for another one.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        self._adapters.check_loaded(name)
        with preserve_process_state(), self._guarding():
            self._requests.end_idle(name)
            if self._populations is not None:
                self._populations.end_resting(name)
            self._adapters.remove(name)

    @property
    def llm_engine(self) -> Any:
        """The `vllm.LLMEngine`, for inspection."""
        return self._vllm

    # -- statistics, end --------------------------------------------------------------

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counters and settings of the engine; after `close`, the last ones.

        `tokens_evaluated` counts the tokens of all queries, `tokens_computed` those that the
        model computed, `tokens_drawn` those of continuations. `contexts_resident` are the
        requests that stay in vLLM now, `contexts_continued` counts the queries that continued
        one, `contexts_ended` those that were ended. `members_living` are the requests of
        populations that stay in vLLM now; `members_continued`, `members_forked` and
        `members_begun` count how the requests of their queries began.
        """
        if self._final_statistics is not None:
            return self._final_statistics
        config, populations = self._vllm.vllm_config, self._populations
        evaluated, computed = self._tokens_evaluated, self._requests.tokens_computed
        if populations is not None:
            evaluated += populations.tokens_evaluated
            computed += populations.tokens_computed
        figures = {
            "tokens_evaluated": evaluated,
            "tokens_computed": computed - self._rows.tokens_copied,
            "tokens_drawn": self._requests.tokens_drawn,
            "steps": self._steps,
            "adapters": len(self._adapters.names),
            "processes": "own" if self._multiprocess else "this",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": str(config.device_config.device_type),
            "kv_block_tokens": int(config.cache_config.block_size),
            "max_context": int(config.model_config.max_model_len) - 1,
            "implementation": self._implementation,
            "contexts": "kept" if self.keeps_contexts else self._reason_not_kept(),
            "populations": (
                "running requests"
                if populations is not None
                else f"single sequences: {self._populations_obstacle}"
            ),
            **self._requests.statistics(),
        }
        return figures if populations is None else figures | populations.statistics()

    def _reason_not_kept(self) -> str:
        return f"not kept: {self._requests.obstacle or 'keep_contexts=False'}"

    def close(self) -> None:
        """Shut vLLM down and free its memory; another engine may start."""
        self._final_statistics = self.statistics()
        engine, self._vllm = self._vllm, None
        if self._monitor is not None:
            self._monitor.stop()
        self._rows.close()
        if self._populations is not None:
            self._populations.close()
        self._requests.close()
        self.submit_group = None
        del self._rows, self._adapters, self._requests, self._populations
        try:
            shut_down(engine, multiprocess=self._multiprocess)
        finally:
            self._release()

    def _release(self) -> None:
        if self._failures is not None:
            self._failures.close()
        if self._accelerator is not None:
            self._accelerator.restore()
        release_process(self)


def _query_check(
    adapters: Adapters, embedded_ids: int, max_context: int, vocab_size: int
) -> Callable[[Query], None]:
    """Return the check of a query, without a reference to the engine.

    vLLM keeps a live engine's parts in global state, so a reference to the engine from one of
    them would keep an engine alive that was dropped without `close`.
    """

    def check(query: Query) -> None:
        check_query(
            query,
            embedding_rows=embedded_ids,
            max_context=max_context,
            adapters=adapters.names,
            vocab_size=vocab_size,  # a worker that fails ends vLLM
        )

    return check
