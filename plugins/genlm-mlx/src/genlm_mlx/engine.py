"""`MLXEngine`: MLX models as a genlm engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Self

import mlx.core as mx
import torch

from genlm import (
    BatchEngine,
    Capability,
    ModelFacts,
    ModelLoadError,
    Query,
    TokenIdError,
    UnknownAdapterError,
    UnsupportedCapability,
    VerifiedFamilies,
    Vocabulary,
    check_verified,
)
from genlm_mlx.adapters import Adapters
from genlm_mlx.choice import choose_tier
from genlm_mlx.corrections import correct
from genlm_mlx.loading import (
    as_dtype,
    check_model,
    context_window,
    embedding_rows,
    limited,
    load_model,
    unwrapped,
)
from genlm_mlx.published import read_config
from genlm_mlx.tiers import GatheredTier, ServeOptions
from genlm_mlx.unfit import UnfitModelError

__all__ = ["MLXEngine"]

DEFAULT_TOKENS_PER_BATCH = 2048


class MLXEngine(BatchEngine):
    """Next-token rows of a language model of mlx-lm's.

    A row does not depend, beyond rounding, on what else is in its batch.

    Args:
        model: A folder, or a hub id.
        dtype: `"float32"`, `"float16"` or `"bfloat16"`; by default as in the checkpoint.
            Quantised weights stay so.
        mlx_opts: Further arguments of `mlx_lm.load`, such as `tokenizer_config`,
            `model_config` or `revision`.
        trust_remote_code: Whether code that comes with a model may be run.
        max_tokens_per_batch: The most new positions, padding included, in one forward
            pass. Longer contexts take several.
        kv_budget_bytes: The most memory that cached keys and values take; by default a
            quarter of what is free. It is taken as it is needed.
        max_context: The most tokens of a context, if fewer than the model takes. Some
            models are served faster, or at all, below a length that the error or
            `statistics()["tier_reason"]` states.
        tier: How to serve the model: `"gathered"`, `"uncached"`, or None for the faster
            that gives the right rows.
        self_test: Whether to compare the gathered tier with mlx-lm's own cache, on a few
            short sequences, when the model is loaded.
        unverified: What happens to models of families that were not compared with
            transformers: `"warn"` or `"refuse"`.

    Raises:
        ModelLoadError: The model does not exist or cannot be served.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: Options that contradict each other or do not exist.
    """

    _final_statistics: Mapping[str, int | float | str] | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        mlx_opts: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        max_tokens_per_batch: int = DEFAULT_TOKENS_PER_BATCH,
        kv_budget_bytes: int | None = None,
        max_context: int | None = None,
        tier: str | None = None,
        self_test: bool = True,
        unverified: str = "warn",
    ) -> None:
        options = ServeOptions(
            max_tokens_per_batch, kv_budget_bytes, tier, self_test, max_context, unverified
        )
        wanted = None if dtype is None else as_dtype(dtype)
        loaded, tokenizer, settings, config = load_model(
            model, mlx_opts or {}, trust_remote_code=trust_remote_code
        )
        if wanted is not None:
            loaded.set_dtype(wanted)
        self._serve(loaded, tokenizer, settings, config, options)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        config: Mapping[str, Any] | None = None,
        *,
        max_tokens_per_batch: int = DEFAULT_TOKENS_PER_BATCH,
        kv_budget_bytes: int | None = None,
        max_context: int | None = None,
        tier: str | None = None,
        self_test: bool = True,
        unverified: str = "warn",
    ) -> Self:
        """Serve a model and tokenizer that the caller has loaded with mlx-lm.

        The model stays the caller's. It must not be changed or run elsewhere while the
        engine steps, and its weights must have been evaluated. Where it computes otherwise
        than transformers it is corrected in place, if its config is known.

        Args:
            model: What `mlx_lm.load` returned.
            tokenizer: What it returned beside it.
            config: What it returned with `return_config=True`.
            max_tokens_per_batch: As in `MLXEngine`, as the others are.
            kv_budget_bytes: As there.
            max_context: As there.
            tier: As there.
            self_test: As there.
            unverified: As there; a model without its config counts as such.

        Raises:
            ModelLoadError: It is no model of mlx-lm's, or cannot be served.
            VocabularyError: The tokenizer cannot be decoded to exact bytes.
        """
        options = ServeOptions(
            max_tokens_per_batch, kv_budget_bytes, tier, self_test, max_context, unverified
        )
        engine = cls.__new__(cls)
        settings = config or dict(vars(model.args) if hasattr(model, "args") else {})
        published = None if config is None else read_config(config)
        engine._serve(model, tokenizer, settings, published, options)  # noqa: SLF001 - its own
        return engine

    def _serve(
        self,
        model: Any,
        tokenizer: Any,
        settings: Mapping[str, Any],
        config: Any,
        options: ServeOptions,
    ) -> None:
        check_model(model)
        model.eval()
        self.vocabulary = Vocabulary.from_tokenizer(unwrapped(tokenizer))
        self.max_context = limited(context_window(settings), options.max_context)
        self._known_ids = embedding_rows(settings, self.vocabulary.size)
        rotary = [] if config is None else correct(model, config, self.max_context)
        check_verified(
            f"mlx-lm {version('mlx-lm')}",
            ModelFacts.of(settings if config is None else config),
            VerifiedFamilies.of_package("genlm_mlx"),
            unverified=options.unverified,
        )
        self._adapters = Adapters(model)
        try:
            self._tier, self._error = choose_tier(
                model,
                self.vocabulary,
                options,
                max_context=self.max_context,
                known_ids=min(self._known_ids, self.vocabulary.size),
                rotary=rotary,
            )
        except UnfitModelError as unfit:
            raise ModelLoadError(
                f"tier={options.tier!r} cannot serve {type(model).__module__}: {unfit}"
            ) from unfit
        abilities = {Capability.LORA}
        if isinstance(self._tier, GatheredTier):
            abilities.add(Capability.PREFIX_CACHE)
        self.capabilities = frozenset(abilities)
        self.capability_hints = {
            Capability.PREFIX_CACHE: f"this model has no cache ({self._tier.reason})"
        }
        self._model_type = type(model).__module__.rpartition(".")[2]
        self._tokens_asked = 0

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that queries can ask for."""
        return self._adapters.names

    def submit(self, query: Query) -> None:
        """Accept a query for the next step.

        Raises:
            UnknownAdapterError: Its adapter was not loaded.
            TokenIdError: The tokenizer has the id, but the model has no embedding
                for it.
            UnsupportedCapability: It asks for a continuation.
        """
        if query.sampling is not None:
            raise self._cannot(Capability.SAMPLE)
        self._check(query.token_ids, query.adapter)
        super().submit(query)

    def _check(self, token_ids: Sequence[int], adapter: str | None) -> None:
        if adapter is not None and adapter not in self._adapters.names:
            raise UnknownAdapterError(adapter, self._adapters.names)
        if max(token_ids) >= self._known_ids:
            position = next(i for i, t in enumerate(token_ids) if t >= self._known_ids)
            raise TokenIdError(token_ids[position], position, self._known_ids)

    def _cannot(self, capability: Capability) -> UnsupportedCapability:
        return UnsupportedCapability(
            capability, "mlx", self.capability_hints.get(capability, "")
        )

    def choose(self, pending: Sequence[Query]) -> Sequence[Query]:
        """Pick what one forward pass computes: of the oldest query's adapter, and the oldest.

        A context longer than a pass, or without room in the cache, takes several all the same.
        """
        adapter = pending[0].adapter
        mine = [query for query in pending if query.adapter == adapter]
        places = self._tier.next_pass(adapter, [query.token_ids for query in mine])
        return [mine[place] for place in places]

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        """Compute the row of each query; they are of one adapter.

        Returns:
            Shape `(len(queries), vocabulary.size)`, float32, on the CPU.
        """
        adapter = queries[0].adapter
        self._tokens_asked += sum(len(query.token_ids) for query in queries)
        with self._adapters.at_work(adapter):
            return self._tier.rows(adapter, [query.token_ids for query in queries])

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and keep it until `clear_prefix_cache`.

        Raises:
            UnsupportedCapability: The model is served without a cache.
            EvaluationError: It does not fit beside what is kept.
            GenlmError: As `submit`.
        """
        if not isinstance(self._tier, GatheredTier):
            raise self._cannot(Capability.PREFIX_CACHE)
        self._check(token_ids, adapter)
        with self._adapters.at_work(adapter):
            self._tier.keep(adapter, tuple(token_ids))

    def clear_prefix_cache(self) -> None:
        """Free everything computed, kept or not. Answers do not change."""
        if not isinstance(self._tier, GatheredTier):
            raise self._cannot(Capability.PREFIX_CACHE)
        self._tier.clear()
        mx.clear_cache()

    def add_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter of mlx-lm's or peft's, to be asked for as `name`.

        Raises:
            AdapterError: The name is taken, the folder holds no LoRA adapter, or it does
                not fit the model; the engine stays as it was.
        """
        self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` loaded.

        Raises:
            UnknownAdapterError: None of that name is loaded.
        """
        if name not in self._adapters.names:
            raise UnknownAdapterError(name, self._adapters.names)
        self._adapters.remove(name)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return what was computed and with what.

        `tokens_asked` counts the tokens of all contexts, `tokens_computed` those that
        went through the model. `tier_reason` says why the tier was chosen,
        `self_test_error` how far its log-probabilities were from those of mlx-lm's own
        cache. After `close`, as it was then.
        """
        if self._final_statistics is not None:
            return self._final_statistics
        error = {} if self._error is None else {"self_test_error": self._error}
        return {
            **self._tier.statistics(),
            **error,
            "tier": self._tier.name,
            "tier_reason": self._tier.reason,
            "tokens_asked": self._tokens_asked,
            "adapters": len(self._adapters.names),
            "model": self._model_type,
            "device": str(mx.default_device()),
        }

    def close(self) -> None:
        """Let go of the model and of what was computed."""
        self._final_statistics = self.statistics()
        del self._tier, self._adapters
        mx.clear_cache()
