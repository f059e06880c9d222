"""`SGLEngine`: SGLang's models, kernels and KV cache in this process as a genlm engine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn

import torch

from genlm.plugin import (
    Capability,
    EvaluationError,
    ModelLoadError,
    Query,
    TokenScores,
    TokenSequence,
    Vocabulary,
    check_unverified_option,
    checked_integer,
    claim_process,
    describe_error,
    loading_stage,
    model_source,
    options_mapping,
    preserve_process_state,
    release_process,
)
from genlm.prefix import (
    BatchLimits,
    PathChoice,
    PrefixEngine,
    PrefixRows,
    UncachedPath,
)
from genlm_sgl.adapters import Adapters
from genlm_sgl.corrections import ModelCorrections
from genlm_sgl.forward import SGLangForward
from genlm_sgl.loading import (
    check_device,
    check_imported_modules,
    checked_options,
    cpu_sizes,
    default_options,
    environment,
    load_error,
    read_text_config,
    runs_on_cpu,
)
from genlm_sgl.model_runner import configure, load_tokenizer, server_options
from genlm_sgl.parallel_model import ParallelModel
from genlm_sgl.process_state import QuietLogger, quiet
from genlm_sgl.served_model import ServedModel
from genlm_sgl.versions import check_version

logger = logging.getLogger("genlm_sgl")

_LOGITS_PER_PASS = 2**27
"""Maximum number of logits of a pass: 512 MiB in float32."""

_LORA_HINT = "load the model with engine_opts={'enable_lora': True}"


def _stubs(*, cpu: bool) -> AbstractContextManager[object]:
    if not cpu:
        return nullcontext()
    from genlm_sgl.cpu.stubs import stub_packages

    return stub_packages()


class SGLEngine(PrefixEngine):
    """Next-token rows of SGLang's models, with a prefix tree in SGLang's KV cache.

    A process can have one such engine at a time.

    Args:
        model: A folder, a hub id, or `"demo"` for the small model of genlm-hf, if installed.
        engine_opts: Arguments of SGLang's `ServerArgs`.
        gpu_id: Index of the GPU, on machines with GPUs; of the first one with `tp_size`.
        unverified: Whether to `"warn"` of or to `"refuse"` a model of a family whose rows were
            not compared with an unbatched forward pass.

    Raises:
        ModelLoadError: SGLang cannot load the model or would compute wrong rows, the model's
            state is not one slot of the KV cache per token, the family is unverified and
            `unverified="refuse"`, or another engine is open.
        MissingRequirementError: The installed version of SGLang is not supported.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        TypeError: SGLang does not have an option, or `gpu_id` is not an integer.
        ValueError: An option is set by the engine or not supported, `gpu_id` is negative, or
            `unverified` has another value.

    Warns:
        UnverifiedModelWarning: The family is unverified.

    Attributes:
        vocabulary: The vocabulary of the tokenizer.
        max_context: The model's window, or the size of the KV cache if that is smaller.
        capabilities: `PREFIX_CACHE` and `SCORE`; `LORA` with `enable_lora` in `engine_opts`.
        capability_hints: Instructions for enabling `LORA` if it is disabled.
        closed: Whether `close` was called.
    """

    backend = "sgl"

    option_homes: ClassVar[Mapping[str, str]] = {"": "engine_opts"}

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine_opts: Mapping[str, Any] | None = None,
        gpu_id: int = 0,
        unverified: str = "warn",
    ) -> None:
        requested = options_mapping("engine_opts", engine_opts)
        checked_integer("gpu_id", gpu_id, 0)
        check_unverified_option(unverified)
        self._version = check_version()
        self.closed = False
        claim_process(self, "SGLang", "use another process")
        self._log = QuietLogger("sglang")
        try:
            options, corrections, tokenizer = self._build(model, requested, gpu_id)
            try:
                self._serve(options, corrections, tokenizer, unverified)
            except BaseException:
                self._served.close()
                raise
        except BaseException:
            self._release_process()
            raise

    def _build(
        self, model: str | os.PathLike[str], requested: Mapping[str, Any], gpu_id: int
    ) -> tuple[Mapping[str, Any], ModelCorrections, Any]:
        """Build the model; return SGLang's options, the corrections and the tokenizer."""
        source = model_source(model)
        loading_stage("starting SGLang: weights, memory, kernels")
        cpu, ranks = runs_on_cpu(requested), requested.get("tp_size", 1)
        checked_integer("engine_opts['tp_size']", ranks, 1)
        check_device(requested)
        if cpu:
            check_imported_modules()
        variables = environment(cpu=cpu, options=requested)
        with preserve_process_state(**variables), quiet(), _stubs(cpu=cpu):
            supported = server_options()
            defaults = default_options(cpu=cpu)
            options = {name: value for name, value in defaults.items() if name in supported}
            options |= checked_options(requested, supported)
            try:
                config = read_text_config(source, options)
                if cpu:
                    options |= cpu_sizes(config, options)
                corrections = ModelCorrections(config, options)
                options = corrections.options | {"model_path": source}
                runner = configure(options, 0, gpu_id)
                tokenizer = load_tokenizer()
                hook = corrections.on_load_weights
                if ranks == 1:
                    self._served = ServedModel(runner, hook)
                else:
                    self._served = ParallelModel(runner, hook, options, gpu_id)
            except ModelLoadError:
                raise
            except Exception as error:
                raise load_error(self._version, source, requested, error) from error
        return options, corrections, tokenizer

    def _serve(
        self,
        options: Mapping[str, Any],
        corrections: ModelCorrections,
        tokenizer: Any,
        unverified: str,
    ) -> None:
        served = self._served
        self.max_context = served.max_context
        corrections.check_loaded(served, unverified=unverified)
        self._corrections = ", ".join(corrections.names)
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer)
        adapters = Adapters(served)
        width = max(served.embedding_rows, self.vocabulary.size)
        self._why_decoded = self._prepare_scores(adapters, width)
        if self._why_decoded is not None:
            self._check_prompt(self._build_path(adapters, width, reads_states=False))
        path = self._build_path(adapters, width, reads_states=self._why_decoded is None)
        hints = {} if options.get("enable_lora") else {Capability.LORA: _LORA_HINT}
        self.serve(
            PathChoice("slots", path, "the only one"),
            adapters,
            embedding_rows=served.embedding_rows,
            hints=hints,
            load_weights=functools.partial(corrections.replace_weights, served),
        )

    def _build_path(self, adapters: Adapters, width: int, *, reads_states: bool) -> PrefixRows:
        served = self._served
        token_bytes = served.bytes_per_token
        max_rows = max(1, _LOGITS_PER_PASS // width)
        return PrefixRows(
            SGLangForward(served, adapters, reads_states=reads_states),
            uncached=_CacheFull(self.vocabulary, BatchLimits(served.max_tokens, max_rows)),
            vocabulary=self.vocabulary,
            budget_bytes=(served.token_capacity + 1) * token_bytes,
            bytes_per_token=token_bytes,
            max_tokens=served.max_tokens,
            max_rows=max_rows,
            make_room=self.compute_unfinished,
        )

    def _prepare_scores(self, adapters: Adapters, width: int) -> str | None:
        """Enable scores in one pass; return the reason if texts must be decoded instead."""
        reason = self._served.why_not_scored
        if reason is not None:
            return reason
        try:
            with quiet():
                self._served.read_hidden_states()
                self._compare_scores(self._build_path(adapters, width, reads_states=True))
        except Exception as error:  # noqa: BLE001 - depends on SGLang's private code
            reason = describe_error(error)
            logger.warning(
                "the tokens of scored texts are decoded, which may be slow: SGLang %s does "
                "not compute scores like the tested version (%s)",
                self._version,
                reason,
            )
        return reason

    def _check_prompt(self, path: PrefixRows) -> None:
        """Compute a prompt, which backends that only decode cannot.

        Raises:
            ModelLoadError: SGLang raises an error.
        """
        try:
            with quiet():
                path.rows(None, [TokenSequence.of(self._prompt())])
        except Exception as error:
            raise ModelLoadError(
                f"SGLang {self._version} cannot compute a prompt of this model, or not with "
                f"its attention_backend and lora_backend; it raised {describe_error(error)}"
            ) from error

    def _prompt(self) -> tuple[int, ...]:
        """Return a prompt that is an extend, if the context is long enough."""
        missing = set(self.vocabulary.missing_ids)
        embedded = range(min(self._served.embedding_rows, self.vocabulary.size))
        token_id = next(i for i in embedded if i not in missing)
        assert self.max_context is not None  # noqa: S101 - set before
        return (token_id,) * min(self.max_context, 16)

    def _compare_scores(self, path: PrefixRows) -> None:
        """Score a text without and with its prefix cached, and compare the scores with a row.

        Raises:
            EvaluationError: A score differs from the log-probability in the row.
        """
        ids = self._prompt()
        token_id = ids[0]
        expected = float(path.rows(None, [TokenSequence.of(ids)])[0, token_id])
        # In other dtypes rounding differs between the two matrix products.
        bound = 1e-3 if self._served.dtype == torch.float32 else 0.25
        for targets in (ids, (token_id,)):
            *_, results = path.scores_by_pass(None, [Query(0, ids, targets=targets)])
            scores = results[0] if results else None
            if not isinstance(scores, TokenScores):
                raise EvaluationError(f"a score is {scores!r}")
            logprob = float(scores.logprobs[-1])
            if not abs(logprob - expected) <= bound:
                raise EvaluationError(f"a score is {logprob}, but {expected} in the row")

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and cache it.

        It stays in the cache until `clear_prefix_cache` is called, or until it is the least
        recently used entry and memory is needed.

        Raises:
            GenlmError: The prefix is invalid; see `submit`.
        """
        query = Query(0, tuple(token_ids), adapter)
        self._check(query)
        self._prefix_cache().rows(adapter, [query.sequence])

    @property
    def model(self) -> Any:
        """The model as a torch module; read-only.

        Raises:
            RuntimeError: The model has several ranks.
        """
        ranks = self._served.ranks
        if ranks > 1:
            raise RuntimeError(
                f"the weights are divided among {ranks} ranks, of which this process is one; "
                f"pass tensors by name to update_weights"
            )
        return self._served.model

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`.

        Raises:
            UnsupportedCapabilityError: The model was loaded without `enable_lora`.
            AdapterError: The name is taken, or the folder has no adapter that SGLang can serve
                with this model.
        """
        with quiet():
            super().add_adapter(name, path)

    def model_statistics(self) -> Mapping[str, int | float | str]:
        """Return SGLang's version, device, model class and size of the KV cache.

        `corrections` lists the differences from the config that were corrected, `scores` is the
        method that scores texts.
        """
        reason = self._why_decoded
        return {
            "sglang": self._version,
            "device": self._served.device,
            "ranks": self._served.ranks,
            "model_class": type(self._served.model).__name__,
            "corrections": self._corrections,
            "scores": f"decoded: {reason}" if reason else "in one pass",
            "kv_token_capacity": self._served.token_capacity,
        }

    def close(self) -> None:
        """Shut SGLang down, so that another engine may be built."""
        super().close()
        self.closed = True
        try:
            self._served.close()
        finally:
            self._release_process()

    def _release_process(self) -> None:
        self._log.restore()
        release_process(self)


class _CacheFull(UncachedPath):
    """Fails sequences that do not fit into the KV cache; SGLang has no other memory for them.

    A context of up to `max_context` tokens fits into a cache without pinned prefixes.
    """

    def run(self, sequences: Sequence[Sequence[int]], firsts: Any) -> NoReturn:  # noqa: ARG002
        raise EvaluationError(
            "a context does not fit into SGLang's KV cache; raise "
            "engine_opts['max_total_tokens']"
        )
