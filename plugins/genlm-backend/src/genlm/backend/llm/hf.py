"""`AsyncTransformer`: Hugging Face transformers models as published."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import torch

from genlm.backend.llm.served import ServedLM, with_rows_on_cpu

__all__ = ["AsyncTransformer"]


class AsyncTransformer(ServedLM):
    """Maps to `genlm.load_model(name, backend="hf")`; rows are on the CPU, as published.

    Args:
        hf_model: A decoder-only transformers model, which must not run or be trained while
            requests are in flight. A `peft.PeftModel` is served as it is handed over. Adapters
            that `hf_model.load_adapter` added are deactivated and used by name.
        hf_tokenizer: Its tokenizer.
        batch_size: Maximum number of sequences in a batch; by default all pending ones.
        timeout: Ignored; batches are dispatched without a timer.

    Attributes:
        model: `hf_model`.
        device: Device of the rows, the CPU. The model is on `model.device`.
    """

    def __init__(
        self,
        hf_model: Any,
        hf_tokenizer: Any,
        batch_size: int | None = None,
        timeout: float = 0.02,
    ) -> None:
        from genlm_hf.engine import HFEngine

        hf_model.eval()
        if getattr(hf_model, "_hf_peft_config_loaded", False):
            hf_model.disable_adapters()
        super().__init__(
            lambda: with_rows_on_cpu(HFEngine.from_model(hf_model, hf_tokenizer)),
            name="hf",
            batch_size=batch_size,
        )
        self.model = hf_model
        self.device = torch.device("cpu")
        self.batch_size = batch_size
        self.timeout = timeout

    @classmethod
    def from_name(  # type: ignore[override]
        cls,
        model_id: str | os.PathLike[str],
        bitsandbytes_opts: dict[str, Any] | None = None,
        hf_opts: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_id: A hub id, a folder, or `"demo"`.
            bitsandbytes_opts: Arguments of `BitsAndBytesConfig`.
            hf_opts: Arguments of `from_pretrained`. By default the checkpoint's own dtype
                and, with several GPUs, `device_map="auto"`.
            **kwargs: Further arguments of the class.

        Raises:
            ModelLoadError: The model does not exist or cannot be served.
            MissingRequirementError: A library is missing.
        """
        from genlm_hf.loading import LoadOptions, load_checkpoint

        options: dict[str, Any] = {"dtype": "auto"}
        if torch.cuda.device_count() > 1:
            options["device_map"] = "auto"
        options |= hf_opts or {}
        if "torch_dtype" in options:
            options["dtype"] = options.pop("torch_dtype")
        trust = bool(options.pop("trust_remote_code", False))
        loading = LoadOptions(
            hf_opts=options, bitsandbytes_opts=bitsandbytes_opts, trust_remote_code=trust
        )
        return cls(*load_checkpoint(model_id, loading), **kwargs)

    def next_token_logprobs_uncached(
        self, token_ids: Sequence[int], lora_name: str | None = None
    ) -> torch.Tensor:
        """Compute a row without the output cache; a blocking method."""
        return self.next_token_logprobs_sync(token_ids, lora_name, use_cache=False)

    def clear_cache(self) -> None:
        """Clear the cached rows, keys and values. Results do not change."""
        super().clear_cache()
        self.clear_kv_cache()
