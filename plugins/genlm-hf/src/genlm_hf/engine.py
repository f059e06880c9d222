"""`HFEngine`: Hugging Face transformers models as a genlm engine.

The engine validates, knows adapters, and leaves the rows to a tier (`genlm_hf.tiers`),
which is chosen when the model is loaded. A few lines longer than other modules: it is the
engine protocol in one place, a third of it docstrings.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from genlm import (
    BatchEngine,
    Capability,
    Query,
    TokenIdError,
    UnknownAdapterError,
    UnsupportedCapability,
    Vocabulary,
)
from genlm_hf.adapters import Adapters
from genlm_hf.forward import current_device
from genlm_hf.limits import (
    context_window,
    embedding_rows,
    input_device,
    is_offloaded,
    padding_id,
)
from genlm_hf.loading import LoadOptions, load_checkpoint, refuse_encoder_decoder
from genlm_hf.prepacked import PrepackedWeights
from genlm_hf.quantised import packed_weights_kept
from genlm_hf.tiers.choice import ServeOptions, choose_tier
from genlm_hf.tiers.tier import PrefixTier, ServedModel

__all__ = ["HFEngine"]

# A core is busy with 2048 tokens, so longer passes would only make others wait longer.
_TOKENS_PER_BATCH = 8192
_TOKENS_PER_BATCH_ON_CPU = 2048

# Logits of one batch: 2**26 float32 are 256 MiB.
_LOGITS_PER_BATCH = 2**26


class HFEngine(BatchEngine):
    """Next-token rows of a decoder-only transformers model.

    A row does not depend, beyond rounding, on what else is in its batch.

    Args:
        model: `"demo"` (a small packaged model), a folder, or a hub id.
        device: For example `"cpu"`, `"cuda:1"`; by default the first CUDA device if there
            is any.
        dtype: A torch dtype, its name, or `"auto"` for the checkpoint's own. By
            default float32 on the CPU and `"auto"` elsewhere.
        hf_opts: Further arguments of transformers' `from_pretrained`, such as
            `device_map`, `attn_implementation`, `revision` or `token`.
        bitsandbytes_opts: Arguments of `BitsAndBytesConfig`.
        trust_remote_code: Whether code that comes with a model may be run.
        max_tokens_per_batch: The most positions, padding included, in one forward
            pass, and so in a step; by default 2048 on a CPU, 8192 elsewhere. Longer
            contexts take several; without a cache they pass whole, alone.
        kv_budget_bytes: The most memory that cached keys and values take; by default
            a quarter of the CPU's free memory, half of a GPU's.
        tier: How to serve the model: `"packed"`, `"gathered"`, `"padded"`, or None for
            the fastest that gives the right rows.
        self_test: Whether to compare the tier with unbatched forward passes of a few
            short sequences when the model is loaded.
        prepack: Whether linear layers on a CPU may keep their weights a second time, in
            the layout that oneDNN multiplies fastest by. Done if a quarter of the free
            memory is enough for it.

    Raises:
        ModelLoadError: The model does not exist or cannot be served.
        MissingRequirementError: A library that the model or an option needs is
            missing.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: Options that contradict each other or do not exist.
    """

    _final_statistics: Mapping[str, int | float | str] | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        hf_opts: Mapping[str, Any] | None = None,
        bitsandbytes_opts: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        max_tokens_per_batch: int | None = None,
        kv_budget_bytes: int | None = None,
        tier: str | None = None,
        self_test: bool = True,
        prepack: bool = True,
    ) -> None:
        serving = ServeOptions(max_tokens_per_batch, kv_budget_bytes, tier, self_test, prepack)
        options = LoadOptions(device, dtype, hf_opts, bitsandbytes_opts, trust_remote_code)
        self._serve(*load_checkpoint(model, options), serving, in_place=True)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        max_tokens_per_batch: int | None = None,
        kv_budget_bytes: int | None = None,
        tier: str | None = None,
        self_test: bool = True,
        prepack: bool = False,
    ) -> Self:
        """Serve a model and tokenizer that the caller has made.

        The model stays the caller's and on its device, to be run in any thread at any time:
        the engine runs modules of its own over the same weights. Weights must not be changed
        while the engine steps; changed in place between steps, they are changed in rows that
        are not cached, unless `prepack=True` (for speed on a CPU) has copied them. Hooks of
        the model run in the engine's passes too. Modules, adapters and attention functions
        that are put into the model later are not the engine's.

        A model with peft adapters, or a `peft.PeftModel`, is served as it is handed over:
        queries without an adapter get the rows of what is switched on in it, `adapters` can
        be asked for one by one.

        Raises:
            ModelLoadError: It is an encoder-decoder, no causal language model, or
                has adapters that are not in its layers alone.
            VocabularyError: The tokenizer cannot be decoded to exact bytes.
        """
        refuse_encoder_decoder(model.config, type(model).__name__)
        serving = ServeOptions(max_tokens_per_batch, kv_budget_bytes, tier, self_test, prepack)
        engine = cls.__new__(cls)
        engine._serve(model, tokenizer, serving, in_place=False)  # noqa: SLF001 - its own class
        return engine

    def _serve(
        self, model: Any, tokenizer: Any, options: ServeOptions, *, in_place: bool
    ) -> None:
        self._adapters = Adapters(model, in_place=in_place)
        model = self._adapters.model
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer)
        self.max_context = context_window(model.config)
        self._embedding_rows = embedding_rows(model) or self.vocabulary.size
        device = input_device(model)
        on_cpu = device.type == "cpu" and not is_offloaded(model)
        most = _TOKENS_PER_BATCH_ON_CPU if on_cpu else _TOKENS_PER_BATCH
        served = ServedModel(
            model=model,
            vocabulary=self.vocabulary,
            device=device,
            embedding_rows=self._embedding_rows,
            pad_id=padding_id(model.config, self._embedding_rows),
            max_context=self.max_context,
            max_tokens=options.max_tokens_per_batch or most,
            max_rows=max(
                1, _LOGITS_PER_BATCH // max(self._embedding_rows, self.vocabulary.size)
            ),
        )
        self._served = served
        self._prepacked = PrepackedWeights(model.modules() if options.prepack else ())
        with current_device(served.device):
            self._choice = choose_tier(served, options)
        self._tier = self._choice.tier
        self._tokens_asked = 0
        self.capabilities, self.capability_hints = self._abilities()

    def _abilities(self) -> tuple[frozenset[Capability], Mapping[Capability, str]]:
        """Return what this model can do beyond rows, and why it cannot do the rest."""
        hints = {}
        if is_offloaded(self._served.model):
            hints[Capability.LORA] = (
                "its device_map offloads layers, into which no adapter can be put; load all of "
                "the model onto devices, for example in 8 or 4 bit"
            )
        elif importlib.util.find_spec("peft") is None:
            hints[Capability.LORA] = "pip install 'genlm-hf[lora]', then load the model again"
        if not isinstance(self._tier, PrefixTier):
            hints[Capability.PREFIX_CACHE] = f"this model has no cache ({self._choice.reason})"
        return frozenset({Capability.LORA, Capability.PREFIX_CACHE} - hints.keys()), hints

    def _cannot(self, capability: Capability) -> UnsupportedCapability:
        return UnsupportedCapability(
            capability, "hf", self.capability_hints.get(capability, "")
        )

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
        if max(token_ids) >= self._embedding_rows:
            position, token_id = next(
                (i, t) for i, t in enumerate(token_ids) if t >= self._embedding_rows
            )
            raise TokenIdError(token_id, position, self._embedding_rows)

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
            Shape `(len(queries), vocabulary.size)`, float32, on the model's device.
        """
        adapter = queries[0].adapter
        self._tokens_asked += sum(len(query.token_ids) for query in queries)
        with self._at_work(adapter):
            return self._tier.rows(adapter, [query.token_ids for query in queries])

    @contextmanager
    def _at_work(self, adapter: str | None) -> Iterator[None]:
        """Let forward passes here be those of an adapter, read what is prepacked."""
        with (
            current_device(self._served.device),
            self._adapters.at_work(adapter),
            self._prepacked.at_work(),
        ):
            yield

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and keep it until `clear_prefix_cache`.

        Raises:
            UnsupportedCapability: The model is served without a cache.
            EvaluationError: It does not fit beside what is kept.
            GenlmError: As `submit`.
        """
        if not isinstance(self._tier, PrefixTier):
            raise self._cannot(Capability.PREFIX_CACHE)
        self._check(token_ids, adapter)
        with self._at_work(adapter):
            self._tier.keep(adapter, tuple(token_ids))

    def clear_prefix_cache(self) -> None:
        """Free everything computed, kept or not. Answers do not change."""
        if not isinstance(self._tier, PrefixTier):
            raise self._cannot(Capability.PREFIX_CACHE)
        self._tier.clear()

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`, to be asked for as `name`.

        Raises:
            UnsupportedCapability: peft is not installed, or layers are offloaded.
            AdapterError: The name is taken, the folder holds no LoRA adapter, or
                it does not fit the model; the engine stays as it was.
        """
        if Capability.LORA not in self.capabilities:
            raise self._cannot(Capability.LORA)
        with packed_weights_kept(self._served.model):
            self._adapters.load(name, path)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` loaded; the model's own layers stay.

        Raises:
            UnknownAdapterError: None of that name is loaded.
        """
        if name not in self._adapters.names:
            raise UnknownAdapterError(name, self._adapters.names)
        with packed_weights_kept(self._served.model):
            self._adapters.remove(name)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return what was computed and with what.

        `tokens_asked` counts the tokens of all contexts, `tokens_computed` those that
        went through the model. `tier_reason` says why the tier was chosen,
        `self_test_error` how far its log-probabilities were from unbatched ones. After
        `close`, as it was then.
        """
        if self._final_statistics is not None:
            return self._final_statistics
        return {
            **self._tier.statistics(),
            **self._choice.statistics(),
            "tokens_asked": self._tokens_asked,
            "adapters": len(self._adapters.names),
            "prepacked_bytes": self._prepacked.nbytes,
            "model": type(self._served.model).__name__,
            "device": str(self._served.device),
            "dtype": str(self._served.model.dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        """Take adapters out of the model and let go of it and of what was computed.

        A model that the caller made is as it was before `from_model`.
        """
        on_cuda = self._served.device.type == "cuda"
        self._final_statistics = self.statistics()
        self._adapters.unload()
        del self._adapters, self._prepacked, self._tier, self._choice, self._served
        if on_cuda:
            torch.cuda.empty_cache()
