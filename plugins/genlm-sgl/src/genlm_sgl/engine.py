"""`SGLEngine`: SGLang's scheduler in this process as a genlm engine.

The engine checks queries and adds them to SGLang's queue. Each step runs one iteration of
SGLang's event loop, so that new queries join the running batch. `requests` makes rows and draws
tokens; `residents` keeps requests whose contexts may be continued; `lifecycle`, `scheduler_api`
and `resident_api` contain all calls into SGLang. Longer than other modules because the engine
protocol is in one place, a third of it docstrings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from genlm.plugin import (
    AdapterError,
    Capability,
    Completion,
    EvaluationError,
    GroupQuery,
    ModelLoadError,
    Query,
    SamplingParams,
    Vocabulary,
    check_query,
    claim_process,
    loading_stage,
    model_source,
    preserve_process_state,
    release_process,
)
from genlm_sgl.adapters import Adapters
from genlm_sgl.corrections import ModelCorrections
from genlm_sgl.lifecycle import server_options
from genlm_sgl.loading import (
    check_cpu_pages,
    checked_options,
    cpu_sizes,
    default_options,
    environment,
    load_error,
    mapping_of,
    runs_on_cpu,
    shown,
)
from genlm_sgl.populations import Populations
from genlm_sgl.process_state import QuietLogger, quiet
from genlm_sgl.requests import Requests
from genlm_sgl.residents import Residents
from genlm_sgl.scheduler_api import FinishedRequest, SchedulerApi
from genlm_sgl.score_api import limit_reuse
from genlm_sgl.versions import check_version, installed_version

__all__ = ["SGLEngine"]

logger = logging.getLogger("genlm_sgl")

_MAX_IDLE_ITERATIONS = 4
"""Iterations of SGLang's loop without progress after which waiting requests fail."""

_INTERNAL = -1
"""Query id of the engine's internal queries; the scheduler's ids begin at 0."""

_LORA_HINT = "load the model with engine_opts={'enable_lora': True}"


def _stop_ids(query: Query) -> frozenset[int]:
    return frozenset() if query.sampling is None else query.sampling.stop_token_ids


def _stubs(*, cpu: bool) -> AbstractContextManager[object]:
    if not cpu:
        return nullcontext()
    from genlm_sgl.cpu.stubs import stub_packages

    return stub_packages()


class SGLEngine:
    """Next-token rows and continuations from SGLang, with its radix cache.

    A process can have one at a time.

    Args:
        model: A folder or a hub id.
        engine_opts: Arguments of SGLang's `ServerArgs`.
        gpu_id: Index of the GPU, on machines with GPUs.
        unverified: `"warn"` or `"refuse"` a model of a family whose rows were not compared with
            an unbatched forward pass.
        keep_contexts: Whether the request of a context stays in SGLang after its row was
            returned, so that one more token costs one row of a decode batch.

    Raises:
        ModelLoadError: SGLang cannot load the model or would compute wrong rows, the family
            is unverified and `unverified="refuse"`, or another engine is alive.
        MissingRequirementError: The installed version of SGLang is not supported.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        TypeError: An option that SGLang does not have.
        ValueError: An option that the engine sets itself, or that needs other processes.

    Warns:
        UnverifiedModelWarning: The family is unverified.
        RuntimeWarning: SGLang's attention on the CPU is not the code that is known here, and
            remains slow for contexts that become requests of their own.

    Attributes:
        vocabulary: The tokenizer's ids.
        max_context: The longest prompt that SGLang accepts: it reserves seven tokens of the
            model's context, or of the KV cache if that is smaller.
        capabilities: `SAMPLE` and `PREFIX_CACHE`; `SCORE` unless SGLang's hidden states cannot
            be read; `LORA` with `enable_lora` in `engine_opts`.
        capability_hints: Instructions for enabling `LORA`, if it is disabled.
        embedding_rows: Number of ids that the model embeds.
        closed: Whether `close` was called.
    """

    option_homes: ClassVar[Mapping[str, str]] = {"": "engine_opts"}

    submit_group: Callable[[GroupQuery], None] | None = None
    """Accepts the query of a population; None if the core expands it to single queries."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine_opts: Mapping[str, Any] | None = None,
        gpu_id: int = 0,
        unverified: str = "warn",
        keep_contexts: bool = True,
    ) -> None:
        wanted = mapping_of(engine_opts)
        self._version = installed_version()
        self._release = check_version(self._version)
        claim_process(self, "SGLang", "use another process")
        self._log = QuietLogger("sglang")
        try:
            self._build(model, wanted, gpu_id, unverified)
            try:
                self._build_residents(keep_contexts)
                self._start_scores()
            except BaseException:
                self._api.close()
                raise
        except BaseException:
            self._release_process()
            raise

    def _build(
        self,
        model: str | os.PathLike[str],
        wanted: Mapping[str, Any],
        gpu_id: int,
        unverified: str,
    ) -> None:
        source = model_source(model)
        loading_stage("starting SGLang: weights, memory, kernels")
        cpu = runs_on_cpu(wanted)
        variables = environment(cpu=cpu)
        with preserve_process_state(**variables), quiet(), _stubs(cpu=cpu):
            known = server_options()
            options = {k: v for k, v in default_options(cpu=cpu).items() if k in known}
            options |= checked_options(wanted, known)
            if cpu:
                check_cpu_pages(options, self._release)
            try:
                if cpu:
                    options |= cpu_sizes(source, options)
                corrections = ModelCorrections(source, options)
                options = corrections.options | {"model_path": source}
                self._api = SchedulerApi(options, gpu_id, corrections.on_load_weights)
            except ModelLoadError:
                raise
            except Exception as error:
                raise load_error(self._version, source, wanted, error) from error
        try:
            longest = self._longest_prompt(wanted)
            corrections.check_loaded(self._api, longest, unverified=unverified)
            self._corrections = ", ".join(corrections.names)
            self.max_context: int | None = longest
            self.vocabulary = Vocabulary.from_tokenizer(self._api.tokenizer)
            if cpu:
                from genlm_sgl.cpu.decode_kernel import use_decode_kernel

                use_decode_kernel(self._api.attention_backend, self._version)
            self._obstacle = self._api.obstacle_to_stay
        except BaseException:
            self._api.close()
            raise
        self.embedding_rows = self._api.embedding_rows
        self.capabilities = frozenset({Capability.SAMPLE, Capability.PREFIX_CACHE})
        self.capability_hints = {Capability.LORA: _LORA_HINT}
        if options.get("enable_lora"):
            self.capabilities |= {Capability.LORA}
            self.capability_hints = {}
        self._adapters = Adapters(self._api)
        self._requests = Requests(self.vocabulary)
        self._api.install_hooks(self._requests)
        self._early: list[Completion] = []  # of iterations outside of `step`
        self.closed = False
        self._idle_iterations = 0
        self._final_statistics: Mapping[str, int | float | str] | None = None

    def _build_residents(self, keep_contexts: bool) -> None:
        self._residents: Residents | None = None
        if self._obstacle is None:
            calls = self._api.resident_api()
            self._residents = Residents(calls, self._requests, self._enqueue_to_stay)
        self._build_populations()
        self.keeps_contexts = keep_contexts

    def _build_populations(self) -> None:
        self._populations: Populations | None = None
        self._why_single = self._obstacle or self._api.obstacle_to_tables
        if self.vocabulary.size > self.embedding_rows:
            self._why_single = "token ids without embeddings"
        if self._residents is None or self._why_single is not None:
            return
        self._populations = populations = Populations(
            self._api.population_api(),
            self._residents,
            self._adapters,
            vocabulary=self.vocabulary,
            submit=self.submit,
            abort=self.abort,
        )
        self._residents.free_tables = populations.evict
        self._residents.slots_in_tables = lambda: populations.slots_used
        self.submit_group = populations.submit

    def _start_scores(self) -> None:
        """Score texts from SGLang's hidden states, if the scores equal those of rows."""
        self._why_by_rows = self._api.obstacle_to_score
        if self._why_by_rows is not None:
            return
        reader = None
        try:
            with quiet():
                reader = self._api.read_hidden_states(self._requests)
                self._compare_scores()
            self.capabilities |= {Capability.SCORE}
        except Exception as error:  # noqa: BLE001 - whatever SGLang's code has become
            self._why_by_rows = f"{type(error).__name__}: {error}"
            logger.warning(
                "texts are scored by a row of each position, which is slow: SGLang %s does "
                "not score them as the versions that are known (%s)",
                self._version,
                self._why_by_rows,
            )
            if reader is not None:
                reader.remove()
        finally:
            self._drain()
            self._api.flush()
            self._api.batches = self._api.tokens_computed = 0
            self._requests.rows_made = self._requests.targets_scored = 0

    def _compare_scores(self) -> None:
        """Score a text twice, the second time from the radix cache; compare with its row.

        Raises:
            EvaluationError: The score differs from the row's.
        """
        missing = set(self.vocabulary.missing_ids)
        token_id = next(i for i in range(self._known_ids) if i not in missing)
        assert self.max_context is not None  # noqa: S101 - our own mistake
        ids = (token_id,) * min(self.max_context, 2 * self._api.page_size + 2)
        row = self._answer(Query(_INTERNAL, ids))
        expected = float(row[token_id])
        for targets in (ids, (token_id,)):
            scores = self._answer(Query(_INTERNAL, ids, targets=targets))
            found = float(scores.logprobs[-1])
            # In other dtypes two matrix products may differ by rounding.
            bound = 1e-3 if self._api.dtype == torch.float32 else 0.25
            if not abs(found - expected) <= bound:
                raise EvaluationError(f"a score is {found}, by the row {expected}")

    def _longest_prompt(self, wanted: Mapping[str, Any]) -> int:
        found = self._api.longest_prompt
        if found < 1:
            raise ModelLoadError(
                f"asked SGLang for {shown(wanted)}, which leaves no room for a prompt: SGLang "
                f"reserves seven tokens of the context and of the KV cache, and in a paged "
                f"cache two pages and a token. Raise 'context_length' or 'max_total_tokens'"
            )
        return found

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Continue a resident with the query, or add it to SGLang's queue.

        Raises:
            GenlmError: As `genlm.plugin.check_query`.
        """
        if query.sampling is not None:
            self._check(query)
            self._enqueue(query, self._max_tokens(len(query), query.sampling))
        elif query.targets or not self.keeps_contexts:
            self._check(query)
            self._enqueue(query, 0)
        elif not self._continue(query):
            self._check(query)
            self._enqueue_to_stay(query)

    def _continue(self, query: Query) -> bool:
        """Continue a resident, at a cost that does not grow with the query's length."""
        assert self._residents is not None  # noqa: S101 - our own mistake
        length = len(query)
        if length < 2 or (self.max_context is not None and length > self.max_context):
            return False
        try:
            sequence = query.sequence
        except OverflowError:  # a negative id, for example
            return False
        (token_id,) = sequence.ids_from(length - 1)
        return token_id < self._known_ids and self._residents.extend(query, token_id)

    def _check(self, query: Query) -> None:
        # SGLang returns another prompt's row for one that is too long, fails on an empty one,
        # and loses slots over an unknown id.
        check_query(
            query,
            embedding_rows=self._known_ids,
            max_context=self.max_context,
            adapters=self._adapters.names,
            vocab_size=self.vocabulary.size,
        )

    @property
    def _known_ids(self) -> int:
        return min(self.embedding_rows, self.vocabulary.size)

    def _enqueue(self, query: Query, max_tokens: int) -> None:
        """Add a query to SGLang's queue as a request of at most that many tokens."""
        if self._residents is not None:
            self._residents.share(query)
        self._add_request(query, max_tokens, max_tokens)

    def _enqueue_to_stay(self, query: Query) -> None:
        """Add a query for a row as a request that becomes a resident."""
        assert self._residents is not None  # noqa: S101 - our own mistake
        self._residents.share(query)
        # Two tokens: SGLang ends a request of none, or of one, with its prefill.
        rid, req = self._add_request(query, 0, 2)
        if req is not None:
            self._residents.adopt(rid, req, query)

    def _add_request(self, query: Query, max_tokens: int, length: int) -> tuple[str, Any]:
        rid = self._requests.add(query, max_tokens)
        try:
            adapter_id = self._adapters.id_of(query.adapter)
            req = self._api.enqueue(rid, query.token_ids, length, _stop_ids(query), adapter_id)
            if req is not None and query.targets:
                limit_reuse(req, len(query) - len(query.targets))
        except BaseException:
            self._requests.drop(query.query_id)
            raise
        return rid, req

    def _max_tokens(self, length: int, sampling: SamplingParams) -> int:
        """Return the maximum number of tokens to draw within `max_context`."""
        if self.max_context is None:
            return sampling.max_tokens
        return min(sampling.max_tokens, self.max_context + 1 - length)

    def step(self) -> list[Completion]:
        """Run one iteration of SGLang's event loop; return the finished queries."""
        completions, self._early = self._early, []
        populations = self._populations
        if populations is not None and len(populations):
            completions += populations.step()
            if not self._requests:
                return completions
        return completions + self._run_once()

    def abort(self, query_id: int) -> None:
        """Abort a query; its slots are free after SGLang's next iteration."""
        if self._populations is not None and self._populations.abort(query_id):
            return
        if self._residents is None or not self._residents.abort(query_id):
            rid = self._requests.drop(query_id)
            if rid is None:
                self._early = [each for each in self._early if each.query_id != query_id]
                return
            self._api.abort(rid)
        if not self._requests:  # the scheduler will not call `step`
            self._drain()

    @property
    def keeps_contexts(self) -> bool:
        """Whether requests of row queries stay in SGLang; may be set between steps."""
        return self._keeps_contexts

    @keeps_contexts.setter
    def keeps_contexts(self, keeps: bool) -> None:
        self._keeps_contexts = keeps and self._residents is not None
        if not keeps:
            self._end_residents()

    def release_context(self, adapter: str | None, key: bytes) -> None:
        """End the resident of a context without references.

        Args:
            adapter: The adapter of the context.
            key: `TokenSequence.key` of its token ids.
        """
        if self._residents is not None:
            self._residents.release(adapter, key)

    def _run_once(self) -> list[Completion]:
        residents, populations = self._residents, self._populations
        if populations is not None:
            populations.give_back()
        completions = self._iterate(residents)
        return completions if populations is None else populations.receive(completions)

    def _iterate(self, residents: Residents | None) -> list[Completion]:
        try:
            if residents is not None:
                residents.before_iteration()
            done = self._api.run_once()
            rows = [] if residents is None else residents.after_iteration(done)
            if residents is not None and not self._keeps_contexts:
                residents.end_idle()
        except Exception as error:
            # All queries in SGLang fail; later ones get a clean scheduler. The error is not
            # raised, because the caller may be unrelated to them.
            failed = self._requests.clear()
            if not failed:  # that could report it
                logger.exception("an iteration of SGLang raised while it had no query")
            self._reset()
            return [Completion(query_id, error=error) for query_id in failed]
        completions = rows + self._requests.completions(done.finished)
        progressed = done.progressed or done.finished
        self._idle_iterations = 0 if progressed else self._idle_iterations + 1
        if self._idle_iterations == _MAX_IDLE_ITERATIONS:
            completions += self._fail_stuck()
        return completions

    def _reset(self) -> None:
        if self._residents is not None:
            self._residents.clear()
        self._api.reset()
        if self._populations is not None:
            self._populations.clear()

    def _drain(self) -> None:
        """Run the loop until no request runs; the next step returns the completions."""
        while self._requests or not self._api.is_idle:
            self._early += self._run_once()
        if self._populations is not None:
            self._populations.give_back()
        try:
            if self._residents is None or not self._residents.hold_slots:
                self._api.check_idle()
            elif lost := self._residents.unaccounted_tokens():
                raise RuntimeError(f"{lost} slots are neither free, cached nor of a resident")
        except Exception:
            logger.exception("SGLang lost slots of its KV cache; the cache is emptied")
            self._reset()

    def _end_residents(self) -> None:
        if self._populations is not None:
            while self._populations.evict():
                pass
        if self._residents is not None:
            self._residents.end_idle()

    def _fail_stuck(self) -> list[Completion]:
        """Fail the requests that SGLang never starts, which would wait forever."""
        self._idle_iterations = 0
        why = (
            f"it does not fit into the KV cache of {self._api.token_capacity} tokens by "
            f"SGLang's estimate; raise engine_opts['max_total_tokens']"
        )
        stuck = [FinishedRequest(rid, [], why) for rid in self._requests.unanswered()]
        self._reset()
        return self._requests.completions(stuck)

    # -- adapters, prefixes -----------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`, after all running queries.

        Raises:
            AdapterError: The name is taken, the folder holds no adapter that SGLang serves
                with this model, or the model was loaded without `enable_lora`.
        """
        if Capability.LORA not in self.capabilities:
            raise AdapterError(f"asked for adapter {name!r}; {_LORA_HINT}")
        self._drain()
        with quiet():
            self._adapters.load(name, path)
        self._limit_adapters()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter after all running requests.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
            EvaluationError: SGLang did not remove it.
        """
        self._adapters.check_loaded(name)
        self._drain()
        self._end_residents()  # another adapter may get the name
        with quiet():
            self._adapters.remove(name)
        self._limit_adapters()

    def _limit_adapters(self) -> None:
        if self._residents is not None:
            self._residents.limit_adapters(self._adapters.ids)

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix into the radix cache.

        It stays until `clear_prefix_cache`, or until SGLang needs the memory and has evicted
        everything used less recently.

        Raises:
            EvaluationError: SGLang could not compute it.
            QueryError: As `submit`.
        """
        query = Query(_INTERNAL, tuple(token_ids), adapter)
        self._check(query)
        self._answer(query)

    def _answer(self, query: Query) -> Any:
        """Run until an internal query is complete; return its result."""
        self._enqueue(query, 0)
        done = None
        while done is None:
            for answer in self._run_once():
                if answer.query_id == query.query_id:
                    done = answer
                else:
                    self._early.append(answer)
        if done.error is not None:
            raise done.error
        return done.result

    def clear_prefix_cache(self) -> None:
        """Empty the radix cache, after all running queries.

        Raises:
            EvaluationError: SGLang did not empty it.
        """
        self._drain()
        self._end_residents()
        if not self._api.flush():
            raise EvaluationError(
                "SGLang did not empty its radix cache although no request runs"
            )

    @property
    def model(self) -> Any:
        """The model as a torch module; read-only."""
        return self._api.model

    @property
    def free_tokens(self) -> int:
        """Number of free KV cache slots; cached prefixes count as used."""
        return self._api.free_tokens

    # -- statistics, close ------------------------------------------------------------

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return SGLang's version, device and model class, and counters.

        `corrections` names the differences from the config that were corrected. `scores` says
        whether texts are scored in one pass, `targets_scored` counts their tokens. `contexts`
        says whether requests of row queries stay in SGLang, `contexts_resident` how many do
        now; `contexts_continued` counts queries that continued one, `contexts_ended` those
        that were ended.
        """
        if self._final_statistics is not None:
            return self._final_statistics
        residents, by_rows = self._residents, self._why_by_rows
        return {
            "sglang": self._version,
            "device": self._api.device,
            "model_class": type(self._api.model).__name__,
            "corrections": self._corrections,
            "batches": self._api.batches,
            "tokens_computed": self._api.tokens_computed,
            "tokens_drawn": self._requests.tokens_drawn,
            "rows": self._requests.rows_made,
            "scores": f"by rows: {by_rows}" if by_rows else "in one pass",
            "targets_scored": self._requests.targets_scored,
            "kv_tokens": self._api.token_capacity,
            "populations": (
                "block tables"
                if self._populations is not None
                else f"single sequences: {self._why_single}"
            ),
            "members_decoded": 0 if self._populations is None else self._populations.decoded,
            "members_single": 0 if self._populations is None else self._populations.single,
            "contexts": "kept" if self.keeps_contexts else f"not kept: {self._why_not_kept()}",
            "contexts_resident": 0 if residents is None else len(residents),
            "contexts_continued": 0 if residents is None else residents.continued,
            "contexts_ended": 0 if residents is None else residents.ended,
        }

    def _why_not_kept(self) -> str:
        return self._obstacle or "keep_contexts=False"

    def close(self) -> None:
        """Shut SGLang down; another engine may then be built."""
        self._final_statistics = self.statistics()
        self.closed = True
        self._residents = self._populations = self.submit_group = None  # refer to SGLang
        try:
            self._api.close()
        finally:
            self._release_process()

    def _release_process(self) -> None:
        self._log.restore()
        release_process(self)
