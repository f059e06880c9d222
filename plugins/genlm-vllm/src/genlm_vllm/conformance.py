"""The targets by which `genlm check vllm` certifies the engine, and their tiny models.

A Llama with random weights, made on the spot. The oracle is transformers' forward pass of
one sequence, in float32 and without a past, and peft's own model for adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from genlm.testing import EngineTarget

__all__ = ["TINY_KV_BYTES", "VOCABULARY", "TinyModel", "targets"]

VOCABULARY = 300
LOGITS = 320
"""More than the tokenizer has ids, as in models with embeddings padded to a round number."""

TINY_KV_BYTES = 6 * 2**15
"""Six blocks of 32 tokens, one of which vLLM keeps for itself: a batch has to queue."""

_TEXT = "Once upon a time there was a fox who ran through the woods and the windy hills. "
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
_ADAPTERS = ("red", "blue")

_LLAMA = {
    "vocab_size": LOGITS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU build computes
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target that computes in this process, and one that does in its own.

    Args:
        folder: Where the model is put.
    """
    model = TinyModel(folder / "llama")
    for name, multiprocess in {"one process": False, "own processes": True}.items():
        yield EngineTarget(
            model=name,
            build=functools.partial(model.engine, multiprocess=multiprocess),
            oracle=model.logprobs,
            adapters=model.adapters,
            max_length=40,  # more than a KV block
            # In processes of its own: only one engine may compute in this one.
            tight_options={"kv_cache_memory_bytes": TINY_KV_BYTES, "multiprocess": True},
            patience_s=300,  # importing vLLM and starting its processes counts too
            shared=True,
        )


class TinyModel:
    """A Llama of two layers in a folder, with two adapters and its oracle.

    Args:
        folder: Where to put it; made when it is first used.
        settings: Of its config, beside the usual ones.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = _LLAMA | dict(settings or {})
        self._folder = folder
        self.adapters = {name: str(folder / name) for name in _ADAPTERS}

    def engine(
        self, *, multiprocess: bool | None = False, lora: bool = True, **options: Any
    ) -> Any:
        """Serve the model in float32, with its adapters or without."""
        from genlm_vllm.engine import VLLMEngine

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": 2**24,
        }
        if lora:
            defaults |= {"enable_lora": True, "max_loras": len(_ADAPTERS)}
        return VLLMEngine(self.path, engine_opts=defaults | options, multiprocess=multiprocess)

    def logprobs(self, token_ids: tuple[int, ...], adapter: str | None = None) -> torch.Tensor:
        """Compute the row of one sequence alone, without a past."""
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            outputs = self._alone(adapter)(
                ids, attention_mask=torch.ones_like(ids), use_cache=False
            )
        row: torch.Tensor = outputs.logits[0, -1, :VOCABULARY].double().log_softmax(-1)
        return row

    @functools.cached_property
    def path(self) -> Path:
        """The folder, once it holds the model, its tokenizer and its adapters."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            _random_model(self._settings).save_pretrained(self._folder)
            for seed, path in enumerate(self.adapters.values()):
                torch.manual_seed(seed + 2)
                self._save_adapter(path)
        _tokenizer().save_pretrained(self._folder)
        return self._folder

    def _save_adapter(self, path: str) -> None:
        import peft

        config = peft.LoraConfig(
            r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(_loaded(self._folder), config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
        adapted.save_pretrained(path)

    @functools.cache  # noqa: B019 - lives as long as the target
    def _alone(self, adapter: str | None) -> Any:
        model = _loaded(self.path)
        if adapter is None:
            return model
        import peft

        return peft.PeftModel.from_pretrained(model, self.adapters[adapter]).eval()


def _random_model(settings: Mapping[str, Any]) -> Any:
    """A model with weights so large that every token matters to every row."""
    import transformers

    config = transformers.LlamaConfig(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


def _loaded(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer of exactly `VOCABULARY` ids."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT * 3], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **_SPECIAL_TOKENS)
