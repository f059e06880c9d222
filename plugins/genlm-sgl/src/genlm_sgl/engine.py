"""`SGLEngine`: SGLang's scheduler in this process as a genlm engine.

The engine validates and hands queries to SGLang, whose loop it turns once per step, so that
new queries join what is running. Rows and draws are made in `requests`; all calls into SGLang
are in `starting`, with what depends on its version, and `scheduler_api`. A little longer than
other modules: it is the engine protocol in one place, a third of it docstrings.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from genlm import (
    AdapterError,
    Capability,
    Completion,
    ContextLengthError,
    EmptySequenceError,
    EvaluationError,
    ModelLoadError,
    Query,
    SamplingParams,
    TokenIdError,
    UnknownAdapterError,
    Vocabulary,
    model_source,
    preserve_process_state,
)
from genlm_sgl import cpu_shim
from genlm_sgl.adapters import Adapters
from genlm_sgl.loading import (
    check_cpu_pages,
    checked_options,
    cpu_token_capacity,
    default_options,
    environment,
    load_error,
    mapping_of,
    shown,
)
from genlm_sgl.process_state import QuietLogger, quiet
from genlm_sgl.requests import Requests
from genlm_sgl.review import ModelReview
from genlm_sgl.scheduler_api import Ended, SchedulerApi
from genlm_sgl.starting import server_options
from genlm_sgl.versions import check_version, installed_version

__all__ = ["SGLEngine"]

logger = logging.getLogger("genlm_sgl")

_only_one = threading.Lock()
"""Held by the live engine: SGLang keeps its settings and groups in globals."""


_PATIENCE = 4
"""Turns in a row that move nothing until what waits is given up."""

_PREFIX = -1
"""Query id of a prefix, which no scheduler uses."""

_LORA_HINT = "load the model with engine_opts={'enable_lora': True}"


def _stop_ids(query: Query) -> frozenset[int]:
    return frozenset() if query.sampling is None else query.sampling.stop_token_ids


class SGLEngine:
    """Next-token rows and continuations from SGLang, with its radix cache.

    There can be one at a time in a process.

    Args:
        model: A folder or a hub id.
        engine_opts: Arguments of SGLang's `ServerArgs`.
        gpu_id: Which GPU, where there are any.
        unverified: What happens to a model of a family whose rows were never compared with an
            unbatched forward pass: `"warn"` or `"refuse"`.

    Raises:
        ModelLoadError: SGLang cannot load the model or would compute wrong rows, the family
            is unverified and such are to be refused, or an engine is alive already.
        MissingRequirementError: The installed SGLang is none of the supported versions.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        TypeError: SGLang takes no such option.
        ValueError: An option that the engine sets itself, or that needs other processes.

    Warns:
        UnverifiedModelWarning: The family is unverified.

    Attributes:
        vocabulary: The tokenizer's ids.
        max_context: The longest prompt that SGLang takes: of the model's window, and of the
            KV cache if that is smaller, SGLang keeps seven tokens for itself.
        capabilities: `SAMPLE` and `PREFIX_CACHE`; `LORA` with `enable_lora` in `engine_opts`.
        capability_hints: How to get `LORA`, without it.
        embedding_rows: How many ids the model can embed.
        closed: Whether `close` was called.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine_opts: Mapping[str, Any] | None = None,
        gpu_id: int = 0,
        unverified: str = "warn",
    ) -> None:
        wanted = mapping_of(engine_opts)
        self._version = installed_version()
        self._release = check_version(self._version)
        if not _only_one.acquire(blocking=False):
            raise ModelLoadError(
                f"asked for SGLang with {os.fspath(model)!r} while another SGLang engine is "
                f"alive in this process, which can hold one at a time; close that one first, "
                f"or use another process"
            )
        self._log = QuietLogger("sglang")
        try:
            self._build(model, wanted, gpu_id, unverified)
        except BaseException:
            self._let_go()
            raise

    def _build(
        self,
        model: str | os.PathLike[str],
        wanted: Mapping[str, Any],
        gpu_id: int,
        unverified: str,
    ) -> None:
        source = model_source(model)
        cpu = wanted.get("device") == "cpu" or not torch.cuda.is_available()
        variables = environment(cpu=cpu)
        with preserve_process_state(**variables), quiet(), cpu_shim.standing_in():
            known = server_options()
            options = {k: v for k, v in default_options(cpu=cpu).items() if k in known}
            options |= checked_options(wanted, known)
            if cpu:
                check_cpu_pages(options, self._release)
            try:
                if cpu and options.get("max_total_tokens") is None:
                    options["max_total_tokens"] = cpu_token_capacity(source, options)
                review = ModelReview(source, options)
                options = review.options | {"model_path": source}
                self._api = SchedulerApi(options, gpu_id, review.watch_weights)
            except ModelLoadError:
                raise
            except Exception as error:
                raise load_error(self._version, source, wanted, error) from error
        try:
            longest = self._longest_prompt(wanted)
            review.finish(self._api, longest, unverified=unverified)
            self._corrections = ", ".join(review.corrections)
            self.max_context: int | None = longest
            self.vocabulary = Vocabulary.from_tokenizer(self._api.tokenizer)
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
        self._api.watch(self._requests)
        self._early: list[Completion] = []  # of steps that were not `step`
        self.closed = False
        self._still = 0  # turns in a row that moved nothing
        self._final_statistics: Mapping[str, int | float | str] | None = None

    def _longest_prompt(self, wanted: Mapping[str, Any]) -> int:
        found = self._api.longest_prompt
        if found < 1:
            raise ModelLoadError(
                f"asked SGLang for {shown(wanted)}, which leaves no room for a prompt: of the "
                f"context and of the KV cache it keeps seven tokens for itself, of a cache in "
                f"pages two and a token. Raise 'context_length' or 'max_total_tokens'"
            )
        return found

    # -- queries ----------------------------------------------------------------------

    def submit(self, query: Query) -> None:
        """Hand a query to SGLang.

        Raises:
            EmptySequenceError: It has no tokens.
            ContextLengthError: It has more than `max_context`.
            TokenIdError: An id that the model cannot embed.
            UnknownAdapterError: Its adapter was not loaded.
        """
        self._check(query.token_ids, query.adapter)
        sampling = query.sampling
        most = 0 if sampling is None else self._most_tokens(query.token_ids, sampling)
        rid = self._requests.add(query, most)
        try:
            adapter_id = self._adapters.id_of(query.adapter)
            self._api.enqueue(rid, query.token_ids, most, _stop_ids(query), adapter_id)
        except BaseException:
            self._requests.drop(query.query_id)
            raise

    def _check(self, token_ids: Sequence[int], adapter: str | None) -> None:
        # SGLang answers a prompt that is too long with another's row, chokes on an empty
        # one, and loses slots over an unknown id: none of them may reach it.
        if adapter is not None and adapter not in self._adapters.names:
            raise UnknownAdapterError(adapter, self._adapters.names)
        if not token_ids:
            raise EmptySequenceError
        if self.max_context is not None and len(token_ids) > self.max_context:
            raise ContextLengthError(len(token_ids), self.max_context)
        size = min(self.embedding_rows, self.vocabulary.size)
        if min(token_ids) < 0 or max(token_ids) >= size:
            position = next(i for i, t in enumerate(token_ids) if not 0 <= t < size)
            raise TokenIdError(token_ids[position], position, size)

    def _most_tokens(self, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """How many tokens to draw: the last one from a context of `max_context`."""
        if self.max_context is None:
            return sampling.max_tokens
        return min(sampling.max_tokens, self.max_context + 1 - len(token_ids))

    def step(self) -> list[Completion]:
        """Turn SGLang's loop once and return what ended."""
        early, self._early = self._early, []
        return early + self._turn()

    def abort(self, query_id: int) -> None:
        """Forget a query; its slots are free when SGLang's next turn ends."""
        rid = self._requests.drop(query_id)
        if rid is None:
            self._early = [each for each in self._early if each.query_id != query_id]
            return
        self._api.abort(rid)
        if not self._requests:  # nobody will ask for that turn
            self._settle()

    def _turn(self) -> list[Completion]:
        try:
            ended, moved = self._api.turn()
        except Exception:
            # Every query in it is lost and fails; later ones find a clean scheduler.
            self._requests.clear()
            self._api.start_over()
            raise
        answers = self._requests.completions(ended)
        self._still = 0 if moved or ended else self._still + 1
        if self._still == _PATIENCE:
            answers += self._give_up()
        return answers

    def _settle(self) -> None:
        """Turn the loop until nothing runs, keeping the answers for the next step."""
        while not self._api.is_idle:
            self._early += self._turn()
        try:
            self._api.check_idle()
        except Exception:
            logger.exception("SGLang lost slots of its KV cache; the cache is emptied")
            self._api.start_over()

    def _give_up(self) -> list[Completion]:
        """Fail what SGLang can never start: its loop would turn on for ever."""
        self._still = 0
        why = (
            f"it does not fit into the KV cache of {self._api.token_capacity} tokens as SGLang "
            f"reckons; raise engine_opts['max_total_tokens']"
        )
        stuck = [Ended(rid, [], why) for rid in self._requests.unanswered()]
        self._api.start_over()
        return self._requests.completions(stuck)

    # -- adapters, prefixes -----------------------------------------------------------

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`, once what is running has ended.

        Raises:
            AdapterError: The name is taken, the folder holds no adapter that SGLang serves
                with this model, or the model was loaded without `enable_lora`.
        """
        if Capability.LORA not in self.capabilities:
            raise AdapterError(f"asked for adapter {name!r}; {_LORA_HINT}")
        self._settle()
        with quiet():
            self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, once what is running has ended.

        Raises:
            UnknownAdapterError: None of that name is loaded.
            EvaluationError: SGLang did not remove it.
        """
        if name not in self._adapters.names:
            raise UnknownAdapterError(name, self._adapters.names)
        self._settle()
        with quiet():
            self._adapters.remove(name)

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix, which then stands in the radix cache.

        It stays until `clear_prefix_cache`, or until SGLang needs the room and everything
        used less recently is gone.

        Raises:
            EvaluationError: SGLang could not compute it.
            QueryError: As `submit`.
        """
        query = Query(_PREFIX, tuple(token_ids), adapter)
        self.submit(query)
        while True:
            for answer in self._turn():
                if answer.query_id != _PREFIX:
                    self._early.append(answer)
                elif answer.error is not None:
                    raise answer.error
                else:
                    return

    def clear_prefix_cache(self) -> None:
        """Empty the radix cache, once what is running has ended.

        Raises:
            EvaluationError: SGLang would not.
        """
        self._settle()
        if not self._api.flush():
            raise EvaluationError("SGLang did not empty its radix cache though nothing runs")

    @property
    def model(self) -> Any:
        """The torch module that SGLang runs; for reading only."""
        return self._api.model

    @property
    def free_tokens(self) -> int:
        """How many tokens of the KV cache hold nothing, not even a cached prefix."""
        return self._api.free_tokens

    # -- figures and the end ----------------------------------------------------------

    def statistics(self) -> Mapping[str, int | float | str]:
        """SGLang's version, device and model class, and what was computed so far.

        `corrections` names what SGLang's model left out of the config and was set right.
        """
        if self._final_statistics is not None:
            return self._final_statistics
        return {
            "sglang": self._version,
            "device": self._api.device,
            "model_class": type(self._api.model).__name__,
            "corrections": self._corrections,
            "batches": self._api.batches,
            "tokens_computed": self._api.tokens_computed,
            "tokens_drawn": self._requests.tokens_drawn,
            "rows": self._requests.rows_made,
            "kv_tokens": self._api.token_capacity,
        }

    def close(self) -> None:
        """Take SGLang down; another engine can then be built."""
        self._final_statistics = self.statistics()
        self.closed = True
        try:
            self._api.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._log.restore()
        _only_one.release()
