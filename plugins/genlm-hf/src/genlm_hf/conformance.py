"""The targets by which `genlm check hf` certifies the engine.

Tiny models with random weights, made on the spot in architectures that keep their past in
different ways. The oracle is transformers' own forward pass of one sequence, without a
past, and peft's own model for adapters.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from genlm.testing import EngineTarget
from genlm_hf.progress import without_bars

__all__ = ["ARCHITECTURES", "targets"]

VOCABULARY = 300
LOGITS = 320
"""More than the tokenizer has ids, as in models with embeddings padded to a round number."""

_TEXT = "Once upon a time there was a fox who ran through the woods and the windy hills. "
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
_ADAPTERS = ("red", "blue")
_TIGHT_BUDGETS = (0, 2048, 20_000)  # in bytes: no token, a few, fewer than a batch has


@dataclass(frozen=True)
class _Architecture:
    """What to build, and which of its layers an adapter can change."""

    settings: Mapping[str, Any]
    adapted: tuple[str, ...]
    lora: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"vocab_size": LOGITS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

ARCHITECTURES = {
    "llama": _Architecture(_LLAMA, ("q_proj", "down_proj")),
    "gpt2": _Architecture(
        _COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        ("c_attn",),
        {"fan_in_fan_out": True},
    ),
    "gptj": _Architecture(
        _COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
        ("q_proj", "v_proj"),
    ),
    "mistral": _Architecture(_LLAMA | {"sliding_window": 4}, ("v_proj", "o_proj")),
    "mamba": _Architecture(
        _COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, ("x_proj",)
    ),
}
"""By transformers' name: grouped-query attention, learned positions, attention in code of
its own, a window shorter than the sequences, a recurrent state."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per architecture; each is built when it is first used.

    Args:
        folder: Where the models are put.
    """
    for name in ARCHITECTURES:
        saved = _SavedModel(name, folder / name)
        yield EngineTarget(
            model=name,
            build=saved.engine,
            oracle=saved.logprobs,
            adapters=saved.adapters if importlib.util.find_spec("peft") else {},
            tight_options=[{"kv_budget_bytes": budget} for budget in _TIGHT_BUDGETS],
        )


class _SavedModel:
    """A model of one architecture in a folder, with its adapters and its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._architecture = ARCHITECTURES[name]
        self.adapters = {adapter: str(folder / adapter) for adapter in _ADAPTERS}

    def engine(self, **options: Any) -> Any:
        """Serve the model, on the CPU in float32."""
        from genlm_hf.engine import HFEngine

        return HFEngine(self._made, device="cpu", dtype="float32", **options)

    def logprobs(self, token_ids: tuple[int, ...], adapter: str | None) -> torch.Tensor:
        """Compute the row of one sequence alone, without a past."""
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            outputs = self._alone(adapter)(
                ids, attention_mask=torch.ones_like(ids), use_cache=False
            )
        row: torch.Tensor = outputs.logits[0, -1, :VOCABULARY].double().log_softmax(-1)
        return row

    @functools.cached_property
    def _made(self) -> Path:
        """The folder, once it holds the model, its tokenizer and its adapters."""
        with without_bars(), torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            model = _random_model(self._name, self._architecture.settings)
            model.save_pretrained(self._folder)
            for seed, path in enumerate(self.adapters.values()):
                torch.manual_seed(seed + 2)
                self._save_adapter(path)
        _tokenizer().save_pretrained(self._folder)
        return self._folder

    def _save_adapter(self, path: str) -> None:
        if importlib.util.find_spec("peft") is None:
            return
        import peft

        config = peft.LoraConfig(
            r=3,
            target_modules=list(self._architecture.adapted),
            task_type="CAUSAL_LM",
            **self._architecture.lora,
        )
        adapted = peft.get_peft_model(_loaded(self._folder), config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
        adapted.save_pretrained(path)

    @functools.cache  # noqa: B019 - lives as long as the target
    def _alone(self, adapter: str | None) -> Any:
        model = _loaded(self._made)
        if adapter is None:
            return model
        import peft

        return peft.PeftModel.from_pretrained(model, self.adapters[adapter]).eval()


def _random_model(name: str, settings: Mapping[str, Any]) -> Any:
    """A model with weights so large that every token matters to every row."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


def _loaded(folder: Path) -> Any:
    import transformers

    with without_bars():
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder, dtype=torch.float32).eval()


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
