"""`VLLMEngine`: vLLM as a genlm engine.

Queries join vLLM's running batch as requests that stay in vLLM between steps (`residents`).
After each step, the workers reduce the rows that the step computed.
`docs/vllm-engine.md` follows a step through the modules.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from genlm import EngineDiedError
from genlm.plugin import (
    AdapterError,
    Capability,
    Completion,
    Count,
    GroupQuery,
    ModelFacts,
    ModelLoadError,
    Query,
    UnsupportedCapabilityError,
    Vocabulary,
    check_unverified_option,
    claim_process,
    describe_error,
    preserve_process_state,
    release_process,
)
from genlm_vllm.adapters import Adapters
from genlm_vllm.forward_check import forward_problem
from genlm_vllm.lifecycle import load_vllm, shut_down
from genlm_vllm.loading import adapter_capacity, checked_options, needs_processes
from genlm_vllm.model_checks import check_served
from genlm_vllm.process_state import Accelerator
from genlm_vllm.processes import ExecutorError, FailureLog, engine_died
from genlm_vllm.residents import Residents
from genlm_vllm.running_requests import why_not_resident
from genlm_vllm.worker import call_workers
from genlm_vllm.workers import Workers

_MAX_SOCKET_FOLDER = 107 - 37
"""Maximum length of the path of a folder for sockets: Linux limits the paths of sockets to 107
characters, and vLLM's names have 36."""

_LORA_HINT = "load the model with engine_opts={'enable_lora': True}"


class VLLMEngine:
    """Next-token rows of a model that vLLM serves.

    Args:
        model: A folder, a hub id, or `"demo"` for the small model of genlm-hf, if installed.
        engine_opts: Arguments of `vllm.EngineArgs`, under vLLM's names.
        multiprocess: Whether vLLM's workers run in other processes. By default they do if
            `engine_opts` request several workers or an executor such as Ray.
        unverified: Whether to `"warn"` of or to `"refuse"` a model of a family whose rows were
            not compared with an unbatched forward pass. No family was compared on a GPU; there,
            `"refuse"` compares the rows of the model at loading with those of transformers on
            the CPU.
        keep_contexts: Whether the requests of row queries stay in vLLM between steps, so that
            extending a context by a token computes one token. No effect on models whose
            requests cannot stay.

    Raises:
        MissingRequirementError: vLLM is not installed, or its version is not supported.
        ModelLoadError: vLLM cannot serve the model or would compute wrong rows, the family is
            unverified and `unverified="refuse"`, or another engine computes in this process.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: An option would make rows wrong, or `unverified` has another value.
        TypeError: vLLM does not have an option, or an option has the wrong type.

    Warns:
        UnverifiedModelWarning: The family is unverified.
    """

    capability_hints: Mapping[Capability, str] = {Capability.LORA: _LORA_HINT}
    _final_statistics: Mapping[str, int | float | str] | None = None
    _death: EngineDiedError | None = None
    _failures: FailureLog | None = None

    option_homes: ClassVar[Mapping[str, str]] = {"": "engine_opts"}

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
        check_unverified_option(unverified)
        if multiprocess not in {None, True, False}:
            raise TypeError(f"multiprocess={multiprocess!r}; expected True, False or None")
        self._multiprocess = needs_processes(options) if multiprocess is None else multiprocess
        if self._multiprocess:
            if options.get("distributed_executor_backend") == "uni":
                raise ValueError("multiprocess=True contradicts the executor 'uni'")
        elif needs_processes(options):
            raise ValueError(
                f"multiprocess=False contradicts engine_opts={options}: several workers need "
                f"separate processes"
            )
        with contextlib.ExitStack() as resources:
            sockets = None
            if self._multiprocess:
                self._failures = resources.enter_context(contextlib.closing(FailureLog()))
                if options.get("distributed_executor_backend") in {None, "mp"}:
                    # Workers exit without closing their sockets, which would leave files.
                    folder = resources.enter_context(TemporaryDirectory(prefix="genlm-"))
                    sockets = folder if len(folder) <= _MAX_SOCKET_FOLDER else None
            else:
                accelerator = Accelerator()
                resources.callback(accelerator.restore)
                # `resources` must not refer to this object, which may be dropped unclosed.
                resources.callback(release_process, accelerator)
                advice = "load with multiprocess=True, which computes in other processes"
                claim_process(accelerator, "vLLM", advice)
            self._vllm, facts = load_vllm(
                model, options, failures=self._failures, sockets=sockets
            )
            resources.callback(shut_down, self._vllm, multiprocess=self._multiprocess)
            self._initialize(facts, unverified)
            self.keeps_contexts = keep_contexts
            self._resources = resources.pop_all()

    def _initialize(self, facts: ModelFacts, unverified: str) -> None:
        engine, config = self._vllm, self._vllm.vllm_config
        descriptions = call_workers(engine, "genlm_describe_model")
        needs_comparison = check_served(config, facts, descriptions, unverified=unverified)
        self._implementation = descriptions[0]["model"]
        self.vocabulary = Vocabulary.from_tokenizer(engine.get_tokenizer())
        capacity = adapter_capacity(engine)
        self._adapters = Adapters(engine, capacity)
        caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._workers = Workers(engine, self.vocabulary, multiprocess=self._multiprocess)
        supported = {
            Capability.LORA: capacity,
            Capability.PREFIX_CACHE: caches_prefixes,
            Capability.SCORE: self._workers.have_scores,
            Capability.WEIGHTS: True,
        }
        self.capabilities = frozenset(name for name, has_it in supported.items() if has_it)
        self._ready: list[Completion] = []
        self._why_not_resident = why_not_resident(config)
        self._residents = Residents(
            engine,
            self._adapters,
            workers=self._workers,
            vocab_size=self.vocabulary.size,
        )
        self.max_context: int = self._residents.max_context
        if needs_comparison:
            self._compare(descriptions)

    def _compare(self, descriptions: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a model whose rows differ from those of transformers."""

        def rows_of(sequences: Sequence[tuple[int, ...]]) -> list[Any]:
            queries = [Query(-1 - number, ids) for number, ids in enumerate(sequences)]
            return [answer.error or answer.result for answer in self._compute(queries)]

        config = self._vllm.vllm_config.model_config
        problem = forward_problem(config, descriptions, rows_of, self.vocabulary.size)
        if problem is not None:
            raise ModelLoadError(
                f"unverified='refuse': {problem}. unverified='warn' serves the model anyway"
            )

    def _compute(self, queries: Sequence[Query]) -> list[Completion]:
        """Compute queries with negative ids, which the core's scheduler does not use."""
        completions: dict[int, Completion] = {}
        try:
            for query in queries:
                self.submit(query)
            while len(completions) < len(queries):
                for completion in self._advance():
                    if completion.query_id < 0:
                        completions[completion.query_id] = completion
                    else:  # the next `step` returns it
                        self._ready.append(completion)
        finally:
            for query in queries:
                self.abort(query.query_id)
        return [completions[query.query_id] for query in queries]

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Add a query to the running batch.

        Raises:
            GenlmError: The query is invalid; see `genlm.plugin.check_query`.
            EngineDiedError: A process of vLLM has ended.
        """
        with self._guarding():
            self._residents.submit(query)

    def submit_group(self, query: GroupQuery) -> None:
        """Add the query of a population; an invalid sequence does not fail the others."""
        with self._guarding():
            self._residents.submit_group(query)

    def step(self) -> list[Completion]:
        """Run one step of vLLM and return the finished queries."""
        ready, self._ready = self._ready, []
        return ready or self._advance()

    def abort(self, query_id: int) -> None:
        """Remove a query from the running batch."""
        self._residents.abort(query_id)

    @property
    def is_deferring(self) -> bool:
        """Whether the next step should wait for further requests; see `BatchEngine.defers`."""
        return self._residents.is_deferring

    @contextlib.contextmanager
    def _guarding(self) -> Iterator[None]:
        """Raise `EngineDiedError` once a worker in another process has failed."""
        if self._death is not None:
            raise EngineDiedError(*self._death.args)
        try:
            yield
        except ExecutorError as error:
            if self._failures is None:
                raise
            cause = error.__cause__ or error
            self._death = engine_died(self._vllm, self._failures, cause)
            raise self._death from cause

    def _advance(self) -> list[Completion]:
        residents = self._residents
        with self._guarding():
            if failed := residents.prepare():
                return failed
            if not residents.unanswered:
                return []
            try:
                self._vllm.step()
            except Exception as error:
                if self._failures is not None:  # the workers may be in different states
                    raise ExecutorError from error
                return self._fail_all(error)
            return residents.collect()

    def _fail_all(self, error: Exception) -> list[Completion]:
        """Fail every query after a step of this process that raised.

        vLLM counts the tokens of that step as computed, also in its prefix cache.

        Raises:
            EngineDiedError: vLLM did not reset its prefix cache.
        """
        dropped = self._residents.abort_all()
        failed = [Completion(query_id, error=error) for query_id in dropped]
        self._residents.idle.end_all()
        if not self._vllm.reset_prefix_cache():
            self._death = EngineDiedError(
                f"a step of vLLM raised {describe_error(error)}; vLLM did not reset "
                f"its prefix cache. Load the model again"
            )
            raise self._death from error
        return failed

    # -- resident contexts ------------------------------------------------------------

    @property
    def keeps_contexts(self) -> bool:
        """Whether the requests of row queries stay in vLLM; may be set between steps."""
        return self._residents.keeps

    @keeps_contexts.setter
    def keeps_contexts(self, keeps: bool) -> None:
        self._residents.keeps = keeps and self._why_not_resident is None
        if not keeps:
            self._residents.idle.end_all()

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """End the idle request of a context; its full KV blocks stay in the prefix cache.

        Args:
            adapter: The context's adapter.
            key: `TokenSequence.key` of the context.
        """
        self._residents.release(adapter, key)

    # -- prefixes, adapters -----------------------------------------------------------

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix, so that vLLM's prefix cache has its full blocks.

        vLLM evicts the least recently used blocks when it needs memory.

        Raises:
            UnsupportedCapabilityError: The model was loaded without prefix caching.
            GenlmError: The prefix is invalid; see `submit`.
        """
        if Capability.PREFIX_CACHE not in self.capabilities:
            raise UnsupportedCapabilityError(Capability.PREFIX_CACHE, "vllm")
        [completion] = self._compute([Query(-1, tuple(token_ids), adapter, outputs=())])
        if completion.error is not None:
            raise completion.error

    def clear_prefix_cache(self) -> None:
        """Finish all running queries, then free all cached prefixes. Results do not change."""
        if Capability.PREFIX_CACHE not in self.capabilities:
            raise UnsupportedCapabilityError(Capability.PREFIX_CACHE, "vllm")
        while self._residents.unanswered:  # vLLM resets nothing while requests have blocks
            self._ready += self._advance()
        with self._guarding():
            self._residents.idle.end_all()
            self._vllm.reset_prefix_cache()

    def update_weights(self, weights: Mapping[str, Any] | None) -> None:
        """Replace the weights of the base model; end idle requests and free cached prefixes.

        Args:
            weights: All tensors of the checkpoint by name; None if vLLM has other weights
                already.

        Raises:
            ValueError: Weights are given for a quantised model, which is unchanged.
            EvaluationError: vLLM cannot load the weights, or some of its parameters received
                none. The model cannot be used afterwards.
            EngineDiedError: A process of vLLM has ended, or vLLM did not free its cache.
        """
        quantization = self._vllm.vllm_config.model_config.quantization
        if weights is not None and quantization is not None:
            # vLLM 0.32 on a CPU loads them without an error and computes other rows.
            raise ValueError(
                f"the weights of a quantised model ({quantization}) cannot be replaced; save "
                f"the new weights and load them as another model"
            )
        self._residents.idle.end_all()
        with preserve_process_state(), self._guarding():
            if weights is not None:
                self._workers.load_weights(weights)
            if not self._vllm.reset_prefix_cache(reset_connector=True):
                raise EngineDiedError("vLLM did not reset its prefix cache")

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`.

        Raises:
            AdapterError: The name is taken, the folder has no adapter that vLLM can serve
                with this model, or the model was loaded without LoRA or for fewer adapters.
        """
        if Capability.LORA not in self.capabilities:
            raise AdapterError(
                f"cannot load adapter {name!r}: the model was loaded without LoRA; {_LORA_HINT}"
            )
        with preserve_process_state(), self._guarding():
            self._adapters.load(name, path)
            self._residents.idle.end_excess()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from every worker, which makes room for another one.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        self._adapters.check_loaded(name)
        with preserve_process_state(), self._guarding():
            self._residents.idle.end_all(name)
            self._adapters.remove(name)

    @property
    def llm_engine(self) -> Any:
        """The `vllm.LLMEngine`, for inspection."""
        return self._vllm

    # -- statistics, end --------------------------------------------------------------

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return counters and settings of the engine; after `close`, their last values.

        `tokens_evaluated` counts the tokens of all queries, `tokens_computed` those that the
        model computed. `contexts_resident` is the number of requests of contexts in vLLM now,
        `contexts_continued` counts the queries that continued one, and `contexts_ended` the
        requests that were ended. `members_living` is the number of requests of populations in
        vLLM now; `members_continued`, `members_forked` and `members_begun` count the sequences
        of populations that continued a request, forked one and began a new one.
        """
        if self._final_statistics is not None:
            return self._final_statistics
        config, residents = self._vllm.vllm_config, self._residents
        return {
            "tokens_evaluated": Count(residents.tokens_evaluated),
            "tokens_computed": Count(residents.requests.tokens_computed),
            "steps": Count(residents.requests.steps),
            "adapters": len(self._adapters.names),
            "processes": "own" if self._multiprocess else "this",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": str(config.device_config.device_type),
            "kv_block_tokens": int(config.cache_config.block_size),
            "max_context": self.max_context,
            "implementation": self._implementation,
            "contexts": (
                "kept"
                if self.keeps_contexts
                else f"not kept: {self._why_not_resident or 'keep_contexts=False'}"
            ),
            **residents.statistics(),
        }

    def close(self) -> None:
        """Shut vLLM down and free its memory; another engine may start."""
        self._final_statistics = self.statistics()
        del self._vllm, self._workers, self._adapters, self._residents
        self._resources.close()
