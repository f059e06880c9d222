"""`SGLEngine`: SGLang's models, kernels and KV cache in this process as a genlm engine."""

from __future__ import annotations

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
    Vocabulary,
    claim_process,
    loading_stage,
    model_source,
    preserve_process_state,
    release_process,
)
from genlm.prefix import (
    BatchLimits,
    PathChoice,
    PrefixEngine,
    PrefixRows,
    ScoredText,
    UncachedPath,
)
from genlm_sgl.adapters import Adapters
from genlm_sgl.corrections import ModelCorrections
from genlm_sgl.forward import SGLangForward
from genlm_sgl.loading import (
    checked_options,
    cpu_sizes,
    default_options,
    environment,
    load_error,
    mapping_of,
    runs_on_cpu,
)
from genlm_sgl.process_state import QuietLogger, quiet
from genlm_sgl.served_model import ServedModel, server_options
from genlm_sgl.versions import check_version, installed_version

__all__ = ["SGLEngine"]

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
    """Next-token rows from SGLang's models, over a prefix tree in SGLang's KV cache.

    A process can have one at a time.

    Args:
        model: A folder or a hub id.
        engine_opts: Arguments of SGLang's `ServerArgs`.
        gpu_id: Index of the GPU, on machines with GPUs.
        unverified: `"warn"` or `"refuse"` a model of a family whose rows were not compared with
            an unbatched forward pass.

    Raises:
        ModelLoadError: SGLang cannot load the model or would compute wrong rows, its state is
            not addressed by the slot of each token, the family is unverified and
            `unverified="refuse"`, or another engine is alive.
        MissingRequirementError: The installed version of SGLang is not supported.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        TypeError: An option that SGLang does not have.
        ValueError: An option that the engine sets itself, or that needs other processes.

    Warns:
        UnverifiedModelWarning: The family is unverified.

    Attributes:
        vocabulary: The tokenizer's ids.
        max_context: The model's window, or the size of the KV cache if that is smaller.
        capabilities: `PREFIX_CACHE`, `SCORE`; `LORA` with `enable_lora` in `engine_opts`.
        capability_hints: Instructions for enabling `LORA`, if it is disabled.
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
        wanted = mapping_of(engine_opts)
        self._version = installed_version()
        check_version(self._version)
        self.closed = False
        claim_process(self, "SGLang", "use another process")
        self._log = QuietLogger("sglang")
        try:
            options, corrections = self._build(model, wanted, gpu_id)
            try:
                self._serve(options, corrections, unverified)
            except BaseException:
                self._served.close()
                raise
        except BaseException:
            self._release_process()
            raise

    def _build(
        self, model: str | os.PathLike[str], wanted: Mapping[str, Any], gpu_id: int
    ) -> tuple[Mapping[str, Any], ModelCorrections]:
        source = model_source(model)
        loading_stage("starting SGLang: weights, memory, kernels")
        cpu = runs_on_cpu(wanted)
        with preserve_process_state(**environment(cpu=cpu)), quiet(), _stubs(cpu=cpu):
            known = server_options()
            options = {k: v for k, v in default_options(cpu=cpu).items() if k in known}
            options |= checked_options(wanted, known)
            try:
                if cpu:
                    options |= cpu_sizes(source, options)
                corrections = ModelCorrections(source, options)
                options = corrections.options | {"model_path": source}
                self._served = ServedModel(options, gpu_id, corrections.on_load_weights)
            except ModelLoadError:
                raise
            except Exception as error:
                raise load_error(self._version, source, wanted, error) from error
        return options, corrections

    def _serve(
        self, options: Mapping[str, Any], corrections: ModelCorrections, unverified: str
    ) -> None:
        served = self._served
        self.max_context = served.max_context
        corrections.check_loaded(served, self.max_context, unverified=unverified)
        self._corrections = ", ".join(corrections.names)
        self.vocabulary = Vocabulary.from_tokenizer(served.tokenizer)
        adapters = Adapters(served)
        width = max(served.embedding_rows, self.vocabulary.size)
        self._why_decoded = self._obstacle_to_reading(adapters, width)
        path = self._path(adapters, width, reads_states=self._why_decoded is None)
        hints = {} if options.get("enable_lora") else {Capability.LORA: _LORA_HINT}
        self.serve(
            PathChoice("slots", path, "the only one"),
            adapters,
            embedding_rows=served.embedding_rows,
            hints=hints,
        )

    def _path(self, adapters: Adapters, width: int, *, reads_states: bool) -> PrefixRows:
        served = self._served
        token_bytes = served.bytes_per_token
        max_rows = max(1, _LOGITS_PER_PASS // width)
        return PrefixRows(
            SGLangForward(served, adapters, reads_states=reads_states),
            uncached=_NoRoom(self.vocabulary, BatchLimits(served.max_tokens, max_rows)),
            vocabulary=self.vocabulary,
            budget_bytes=(served.token_capacity + 1) * token_bytes,
            bytes_per_token=token_bytes,
            max_tokens=served.max_tokens,
            max_rows=max_rows,
        )

    def _obstacle_to_reading(self, adapters: Adapters, width: int) -> str | None:
        """Prepare scores; return why texts are decoded, else None."""
        obstacle = self._served.obstacle_to_score
        if obstacle is not None:
            return obstacle
        try:
            with quiet():
                self._served.read_hidden_states()
                self._compare_scores(self._path(adapters, width, reads_states=True))
        except Exception as error:  # noqa: BLE001 - whatever SGLang's code has become
            obstacle = f"{type(error).__name__}: {error}"
            logger.warning(
                "the tokens of scored texts are decoded, which may be slow: SGLang %s does "
                "not score them as the version that is known (%s)",
                self._version,
                obstacle,
            )
        return obstacle

    def _compare_scores(self, path: PrefixRows) -> None:
        """Score a text twice, the second time from the cache; compare with its row.

        Raises:
            EvaluationError: The score differs from the row's.
        """
        missing = set(self.vocabulary.missing_ids)
        known = range(min(self._served.embedding_rows, self.vocabulary.size))
        token_id = next(i for i in known if i not in missing)
        assert self.max_context is not None  # noqa: S101 - our own mistake
        ids = (token_id,) * min(self.max_context, 16)
        expected = float(path.rows(None, [ids])[0, token_id])
        # In other dtypes two matrix products may differ by rounding.
        bound = 1e-3 if self._served.dtype == torch.float32 else 0.25
        for targets in (ids, (token_id,)):
            [scores] = path.scores(None, [ScoredText.of(Query(0, ids, targets=targets))])
            if not isinstance(scores, TokenScores):
                raise EvaluationError(f"a score is {scores!r}")
            found = float(scores.logprobs[-1])
            if not abs(found - expected) <= bound:
                raise EvaluationError(f"a score is {found}, by the row {expected}")

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix.

        It stays until `clear_prefix_cache`, or until its memory is needed and everything used
        less recently was evicted.

        Raises:
            GenlmError: As `submit`.
        """
        query = Query(0, tuple(token_ids), adapter)
        self._check(query)
        self._prefix_cache().rows(adapter, [query.sequence])

    @property
    def model(self) -> Any:
        """The model as a torch module; read-only."""
        return self._served.model

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path` as `name`.

        Raises:
            UnsupportedCapabilityError: The model was loaded without `enable_lora`.
            AdapterError: The name is taken, or the folder holds no adapter that SGLang serves
                with this model.
        """
        with quiet():
            super().add_adapter(name, path)

    def model_statistics(self) -> Mapping[str, int | float | str]:
        """Return SGLang's version, device, model class and size of the KV cache.

        `corrections` names the differences from the config that were corrected, `scores` the
        method by which texts are scored.
        """
        return {
            "sglang": self._version,
            "device": self._served.device,
            "model_class": type(self._served.model).__name__,
            "corrections": self._corrections,
            "scores": f"decoded: {why}" if (why := self._why_decoded) else "in one pass",
            "kv_token_capacity": self._served.token_capacity,
        }

    def close(self) -> None:
        """Shut SGLang down; another engine may then be built."""
        super().close()
        self.closed = True
        try:
            self._served.close()
        finally:
            self._release_process()

    def _release_process(self) -> None:
        self._log.restore()
        release_process(self)


class _NoRoom(UncachedPath):
    """Fails sequences that do not fit into the KV cache: SGLang has no other memory for them.

    A context within `max_context` fits into a cache of which nothing is pinned.
    """

    def run(self, sequences: Sequence[Sequence[int]], firsts: Any) -> NoReturn:  # noqa: ARG002
        raise EvaluationError(
            "a context does not fit into SGLang's KV cache; raise "
            "engine_opts['max_total_tokens']"
        )
