"""The targets by which `genlm check sgl` certifies the engine.

A tiny Llama with random weights, made on the spot, served in the ways that SGLang batches
differently. The oracle is transformers' own forward pass of one sequence, without a past, in
float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from genlm.testing import EngineTarget
from genlm_sgl.alternating import AlternatingEngine
from genlm_sgl.versions import CPU_PAGES_FROM, check_version, installed_version

__all__ = ["LOGITS", "VOCABULARY", "TinyModel", "targets"]

VOCABULARY = 300
LOGITS = 320
"""More than the tokenizer has ids, as in models with embeddings padded to a round number."""

_TEXT = "Once upon a time there was a fox who ran through the woods and the windy hills. "
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"max_total_tokens": 4096},
    # Batches overlap, 40 tokens go through the model at a time, the prompt that would be the
    # last in chunks; pages hold 4 tokens, the cache a few prompts, the context 23 tokens.
    "cramped": {
        "chunked_prefill_size": 40,
        "context_length": 30,
        "disable_overlap_schedule": False,
        "max_running_requests": 8,
        "max_total_tokens": 160,
        "page_size": 4,
    },
}
"""Engine options of each target."""

_TIGHT = (
    {"disable_radix_cache": True},
    {"max_total_tokens": 40, "page_size": 1},
    {"max_total_tokens": 64, "page_size": 16, "chunked_prefill_size": 16},
)
"""No prefix is kept; the longest sequence just fits; four pages."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per setting; all serve one model.

    Args:
        folder: Where the model is put.
    """
    model = TinyModel(folder / "llama")
    paged = check_version(installed_version()) >= CPU_PAGES_FROM
    for name, options in SETTINGS.items():
        yield EngineTarget(
            model=name,
            build=functools.partial(_alternating, model, _fitting(options, paged=paged)),
            oracle=lambda token_ids, _adapter: model.logprobs(token_ids),
            patience_s=240.0,  # the first engine imports SGLang
            tight_options=[_fitting(options, paged=paged) for options in _TIGHT],
            shared=True,
        )


def _fitting(options: Mapping[str, Any], *, paged: bool) -> Mapping[str, Any]:
    """The options, for versions before pages on a CPU without them and without overlap.

    Where batches overlap, 0.5.8 was seen to admit more prompts than run at once, and to raise.
    """
    return options if paged else {**options, "page_size": 1, "disable_overlap_schedule": True}


def _alternating(
    model: TinyModel, options: Mapping[str, Any], **more: Any
) -> AlternatingEngine:
    return AlternatingEngine(functools.partial(model.engine, options, **more))


class TinyModel:
    """A Llama in a folder, with its oracle.

    Args:
        folder: Where to put it, on first use.
        positions: Its context window.
        width: How many logits it has.
    """

    def __init__(self, folder: Path, *, positions: int = 64, width: int = LOGITS) -> None:
        self._folder = folder
        self._positions = positions
        self._width = width

    def engine(self, options: Mapping[str, Any], **more: Any) -> Any:
        """Serve the model, on the CPU in float32."""
        from genlm_sgl.engine import SGLEngine

        wanted = {"device": "cpu", "dtype": "float32", **options, **more}
        return SGLEngine(self.folder, engine_opts=wanted)

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the row of one sequence alone, without a past."""
        with torch.no_grad():
            logits = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits
        row: torch.Tensor = logits[0, -1, :VOCABULARY].double().log_softmax(-1)
        return row

    @functools.cached_property
    def folder(self) -> Path:
        """Where config, weights and tokenizer are."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        config = transformers.LlamaConfig(
            vocab_size=self._width,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self._positions,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            model = transformers.LlamaForCausalLM(config)
            with torch.no_grad():
                # Weights so large that every token matters to every row.
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0, 0.15)
        model.save_pretrained(self._folder)
        _tokenizer().save_pretrained(self._folder)
        return self._folder

    @functools.cached_property
    def _model(self) -> Any:
        import transformers

        load = transformers.LlamaForCausalLM.from_pretrained
        return load(self.folder, dtype=torch.float32).eval()


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
