"""`HFEngine`: Hugging Face transformers models as a genlm engine.

Every query's context is computed anew in a padded forward pass. That is right for
every decoder-only model and the reference for anything faster.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from genlm import (
    BatchEngine,
    Capability,
    MissingRequirementError,
    ModelLoadError,
    Query,
    TokenIdError,
    UnknownAdapterError,
    UnsupportedCapability,
    Vocabulary,
    rows_from_logits,
)
from genlm_hf.adapters import Adapters
from genlm_hf.batches import BatchLimits, plan_batches
from genlm_hf.forward import next_logits
from genlm_hf.limits import context_window, embedding_rows, input_device, padding_id
from genlm_hf.loading import LoadOptions, load_checkpoint, refuse_encoder_decoder
from genlm_hf.probe import padding_is_safe, sample_ids
from genlm_hf.rope import depends_on_longest, forget_longest

__all__ = ["HFEngine"]

DEFAULT_TOKENS_PER_BATCH = 8192

# Logits of one batch: 2**26 float32 are 256 MiB.
_LOGITS_PER_BATCH = 2**26


class HFEngine(BatchEngine):
    """Next-token rows of a decoder-only transformers model.

    A row does not depend, beyond rounding, on what else is in its batch.

    Args:
        model: `"demo"` (a small packaged model), a folder, or a hub id.
        device: For example `"cpu"`, `"cuda:1"`; by default CUDA if there is any.
        dtype: A torch dtype, its name, or `"auto"` for the checkpoint's own. By
            default float32 on the CPU and `"auto"` elsewhere.
        hf_opts: Further arguments of transformers' `from_pretrained`, such as
            `device_map`, `attn_implementation`, `revision` or `token`.
        bitsandbytes_opts: Arguments of `BitsAndBytesConfig`.
        trust_remote_code: Whether code that comes with a model may be run.
        max_tokens_per_batch: The most positions, padding included, in one forward
            pass; a longer context still passes, alone.

    Raises:
        ModelLoadError: The model does not exist or cannot be served.
        MissingRequirementError: A library that the model or an option needs is
            missing.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: Options that contradict each other or do not exist.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        hf_opts: Mapping[str, Any] | None = None,
        bitsandbytes_opts: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        max_tokens_per_batch: int = DEFAULT_TOKENS_PER_BATCH,
    ) -> None:
        options = LoadOptions(device, dtype, hf_opts, bitsandbytes_opts, trust_remote_code)
        self._serve(*load_checkpoint(model, options), max_tokens_per_batch)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        max_tokens_per_batch: int = DEFAULT_TOKENS_PER_BATCH,
    ) -> Self:
        """Serve a model and tokenizer that the caller has made.

        The model stays the caller's and on its device. Its weights are never
        changed; adapters put layers into it, which `close` takes out. It must not
        be changed or run elsewhere while the engine steps.

        Raises:
            ModelLoadError: It is an encoder-decoder, no causal language model, or
                has peft layers already.
            VocabularyError: The tokenizer cannot be decoded to exact bytes.
        """
        if hasattr(model, "peft_config"):
            raise ModelLoadError(
                f"a {type(model).__name__} with peft adapters was passed; pass the base model "
                f"and load its adapters with add_new_lora, or what merge_and_unload returns"
            )
        refuse_encoder_decoder(model.config, type(model).__name__)
        engine = cls.__new__(cls)
        engine._serve(model, tokenizer, max_tokens_per_batch)  # noqa: SLF001 - its own class
        return engine

    def _serve(self, model: Any, tokenizer: Any, max_tokens_per_batch: int) -> None:
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer)
        self.max_context = context_window(model.config)
        has_peft = importlib.util.find_spec("peft") is not None
        self.capabilities = frozenset({Capability.LORA} if has_peft else ())
        self._model = model
        self._device = input_device(model)
        self._embedding_rows = embedding_rows(model) or self.vocabulary.size
        self._pad_id = padding_id(model.config, self._embedding_rows)
        self._by_longest = depends_on_longest(model.config.get_text_config())
        self._adapters = Adapters(model)
        self._forwards = self._tokens_computed = self._tokens_padded = 0
        self._limits = BatchLimits(
            max_tokens=max_tokens_per_batch,
            max_rows=max(
                1, _LOGITS_PER_BATCH // max(self._embedding_rows, self.vocabulary.size)
            ),
            equal_lengths=self._by_longest or not self._padding_is_safe(),
        )

    def _padding_is_safe(self) -> bool:
        known = min(self._embedding_rows, self.vocabulary.size)
        ids = sample_ids(self.vocabulary.tokenizer, known, self.max_context)
        return padding_is_safe(self._logits, ids)

    def submit(self, query: Query) -> None:
        """Accept a query for the next step.

        Raises:
            UnknownAdapterError: Its adapter was not loaded.
            TokenIdError: The tokenizer has the id, but the model has no embedding
                for it.
            UnsupportedCapability: It asks for a continuation.
        """
        if query.sampling is not None:
            raise UnsupportedCapability(Capability.SAMPLE, "hf")
        if query.adapter is not None and query.adapter not in self._adapters.names:
            raise UnknownAdapterError(query.adapter, self._adapters.names)
        if max(query.token_ids) >= self._embedding_rows:
            position, token_id = next(
                (i, t) for i, t in enumerate(query.token_ids) if t >= self._embedding_rows
            )
            raise TokenIdError(token_id, position, self._embedding_rows)
        super().submit(query)

    def evaluate(self, queries: Sequence[Query]) -> torch.Tensor:
        """Compute the row of each query in as few forward passes as the limits allow.

        Queries of one adapter share passes; similar lengths go together.

        Returns:
            Shape `(len(queries), vocabulary.size)`, float32, on the model's device.
        """
        rows = torch.empty((len(queries), self.vocabulary.size), device=self._device)
        by_adapter: dict[str | None, list[int]] = {}
        for index, query in enumerate(queries):
            by_adapter.setdefault(query.adapter, []).append(index)
        for adapter, indices in by_adapter.items():
            lengths = [len(queries[i].token_ids) for i in indices]
            with self._adapters.at_work(adapter):
                for batch in plan_batches(lengths, self._limits):
                    chosen = [indices[i] for i in batch]
                    logits = self._logits([queries[i].token_ids for i in chosen])
                    computed = rows_from_logits(logits, self.vocabulary)
                    rows[chosen] = computed.to(rows.device)
        return rows

    def _logits(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        if self._by_longest:
            forget_longest(self._model)
        logits = next_logits(
            self._model,
            sequences,
            pad_id=self._pad_id,
            device=self._device,
            positions=positions,
        )
        tokens = sum(map(len, sequences))
        self._forwards += 1
        self._tokens_computed += tokens
        self._tokens_padded += len(sequences) * max(map(len, sequences)) - tokens
        return logits

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`, to be asked for as `name`.

        Raises:
            MissingRequirementError: peft is not installed.
            AdapterError: The name is taken, the folder holds no LoRA adapter, or
                it does not fit the model; the engine stays as it was.
        """
        if Capability.LORA not in self.capabilities:
            raise MissingRequirementError(
                f"adapter {name!r}", ["peft"], "pip install 'genlm-hf[lora]'"
            )
        self._adapters.load(name, path)

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return what was computed and with what.

        `tokens_computed` counts tokens of contexts, `tokens_padded` the positions
        that only filled batches up; both include the check at loading.
        """
        return {
            "tokens_computed": self._tokens_computed,
            "tokens_padded": self._tokens_padded,
            "forwards": self._forwards,
            "adapters": len(self._adapters.names),
            "model": type(self._model).__name__,
            "device": str(self._device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        """Take adapters out of the model and let go of it.

        A model that the caller made is as it was before `from_model`.
        """
        self._adapters.unload()
        del self._adapters, self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
