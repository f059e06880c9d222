"""`TinyModel`: a small random model on disk, for engines that load transformers checkpoints.

Its oracle is transformers' forward pass of one sequence, in float32 and without a KV cache,
through peft for adapters.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from genlm import ModelFacts

if TYPE_CHECKING:
    from genlm.testing.target import Oracle, TokenTuple
    from genlm.testing.tiny_families import Family

TINY_VOCABULARY = 300
"""Number of ids of the tokenizer."""

TINY_LOGITS = 320
"""Number of logits: more than ids, as in models with padded embeddings."""

TINY_LLAMA: Mapping[str, Any] = {
    "vocab_size": TINY_LOGITS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The config of a Llama with grouped-query attention and a window of 64 tokens."""

_SCALE = 0.15
"""Standard deviation of random weights in a model as wide as `TINY_LLAMA`."""

_NOISE = 0.1
"""Standard deviation of the noise added to biases and norm weights."""

_TEXT = "Once upon a time there was a fox who ran through the woods and the windy hills. "
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


class TinyModel:
    """A causal language model with random weights in a folder, and its oracle.

    The weights are so large that every token affects every row. The class needs transformers,
    and peft for adapters.

    Args:
        folder: Folder of model, tokenizer and adapters, written on first use of `path`.
        settings: All settings of the config; by default `TINY_LLAMA`.
        model_type: transformers' name of the architecture.
        adapters: Names of random LoRA adapters to create.
        lora: Arguments of `peft.LoraConfig`, including `target_modules`.
        scale: Standard deviation of the weights.

    Attributes:
        adapters: Folder of each adapter, by name; empty without peft.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any] = TINY_LLAMA,
        *,
        model_type: str = "llama",
        adapters: Sequence[str] = (),
        lora: Mapping[str, Any] | None = None,
        scale: float = _SCALE,
    ) -> None:
        self._folder = folder
        self._scale = scale
        self._settings = settings
        self._model_type = model_type
        self._lora = lora or {"target_modules": ["q_proj", "down_proj"]}
        self._last_pass: dict[str | None, tuple[TokenTuple, torch.Tensor]] = {}
        if importlib.util.find_spec("peft") is None:
            adapters = ()
        self.adapters = {name: str(folder / name) for name in adapters}

    @classmethod
    def of(cls, folder: Path, family: Family, **options: Any) -> Self:
        """Create the model of a family; wider models have smaller weights.

        Args:
            folder: Folder of model, tokenizer and adapters.
            family: One of `families`.
            **options: `adapters` and `lora` of the class.
        """
        scale = _SCALE * (TINY_LLAMA["hidden_size"] / family.hidden_size) ** 0.5
        return cls(
            folder, family.settings, model_type=family.model_type, scale=scale, **options
        )

    @functools.cached_property
    def path(self) -> Path:
        """The folder with the model, its tokenizer and its adapters, written on first use."""
        self._save_model(self._folder, seed=1)
        with torch.random.fork_rng(devices=()), _hidden_progress_bars():
            for seed, path in enumerate(self.adapters.values()):
                torch.manual_seed(seed + 2)
                self._save_adapter(path)
        return self._folder

    @functools.cached_property
    def vocab_size(self) -> int:
        """Width of a row: more than `TINY_VOCABULARY` if transformers adds special tokens."""
        import transformers

        return len(transformers.AutoTokenizer.from_pretrained(self.path))

    def logprobs(self, token_ids: Sequence[int], adapter: str | None = None) -> torch.Tensor:
        """Compute the row of one sequence without batching or KV cache; float64.

        A prefix of the sequence of the previous call needs no further forward pass.
        """
        row: torch.Tensor = self._logits(token_ids, adapter)[-1].double().log_softmax(-1)
        return row

    def all_logprobs(
        self, token_ids: Sequence[int], adapter: str | None = None
    ) -> torch.Tensor:
        """Compute the rows after each token of one sequence, as `logprobs` does."""
        return self._logits(token_ids, adapter).double().log_softmax(-1)

    @property
    def weights(self) -> list[tuple[Callable[[], Mapping[str, torch.Tensor]], Oracle]]:
        """The tensors of the model, then other ones, both with the oracle of their rows."""

        def changed_row(token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
            return self._changed.logprobs(token_ids, adapter)

        return [
            (lambda: _tensors(self.path), self.logprobs),
            (lambda: _tensors(self._changed.path), changed_row),
        ]

    @functools.cached_property
    def _changed(self) -> TinyModel:
        """The model with other weights and the same adapters."""
        changed = copy.copy(self)
        changed.path = self.path / "changed"
        changed._last_pass = {}  # noqa: SLF001
        self._save_model(changed.path, seed=2)
        return changed

    def _logits(self, token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        sequence = tuple(token_ids)
        if adapter in self._last_pass:
            previous, of_previous = self._last_pass[adapter]
            if previous[: len(sequence)] == sequence:
                return of_previous[: len(sequence)]
        ids = torch.tensor([sequence])
        model = self._model_of(adapter)
        facts = ModelFacts.of(model.config)
        if facts.rope_by_longest:
            model = copy.deepcopy(model)  # it stores the length of the longest sequence so far
        with torch.no_grad():
            outputs = model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        logits: torch.Tensor = outputs.logits[0, :, : self.vocab_size]
        # Otherwise, the row of a prefix differs in a longer sequence: rotary frequencies depend
        # on the length, and so does the choice between tokens of equal scores.
        if not facts.rope_by_longest and "sparse_attention" not in facts.mechanisms:
            self._last_pass[adapter] = sequence, logits
        return logits

    def _save_model(self, folder: Path, seed: int) -> None:
        """Write a model with random weights, and the tokenizer."""
        model = random_model(self._model_type, self._settings, scale=self._scale, seed=seed)
        with _hidden_progress_bars():
            model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    def _save_adapter(self, path: str) -> None:
        import peft

        config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", **self._lora)
        peft_model = peft.get_peft_model(_load_model(self._folder), config)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
        peft_model.save_pretrained(path)

    @functools.cache  # noqa: B019 - the model lives as long as its target
    def _model_of(self, adapter: str | None) -> Any:
        model = _load_model(self.path)
        if adapter is None:
            return model
        import peft

        return peft.PeftModel.from_pretrained(model, self.adapters[adapter]).eval()


def random_model(
    model_type: str, settings: Mapping[str, Any], *, scale: float = _SCALE, seed: int = 1
) -> Any:
    """Build a transformers model with random weights from a seed.

    The weights are so large that every token and every parameter affects every row: biases,
    norm weights and attention sinks are random too.

    Args:
        model_type: transformers' name of the architecture.
        settings: All settings of the config.
        scale: Standard deviation of matrices.
        seed: Random seed.

    Returns:
        The model, float32, in evaluation mode.
    """
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(seed)
        build = transformers.AutoModelForCausalLM.from_config
        model = build(config, attn_implementation=_attention(config)).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, scale)
            elif name.endswith("sinks"):
                parameter.normal_(0, 2)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
    return model


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer with exactly `TINY_VOCABULARY` ids."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_TEXT * 3], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **_SPECIAL_TOKENS)


def _tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: Mapping[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def _load_model(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with _hidden_progress_bars():
        return load(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=_attention(config),
        ).eval()


def _attention(config: Any) -> str | None:
    """Return eager attention for soft-capped scores, which torch's kernels do not support."""
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if is_capped else None


@contextmanager
def _hidden_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which appear once per model."""
    from transformers.utils import logging

    is_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            logging.enable_progress_bar()
