"""Models whose config makes attention bidirectional are refused by it; an oracle says which do.

Weights of trained size are not needed: with small ones, a row depends on later tokens too
little for the comparison of two forward passes to see it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from genlm.plugin import ModelFacts, ModelLoadError
from genlm_hf.engine import HFEngine

from .tiny import WIDTH

TINY = {
    **dict.fromkeys(["hidden_size", "d_model", "emb_dim"], 16),
    **dict.fromkeys(["intermediate_size", "d_inner", "feed_forward_size"], 16),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_key_value_heads"], 2),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers"], 2),
    "attention_type": "original_full",
    "attn_layers": ["local", "local"],
    "axial_pos_embds": False,
    "bos_token_id": 2,
    "default_language": "en",
    "embedding_size": 16,
    "eos_token_id": 3,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "languages": ["en"],
    "max_position_embeddings": 64,
    "num_kv_shared_layers": 0,
    "pad_token_id": 1,
    "vocab_size": 40,
    "vocab_size_per_layer_input": 40,
}


def build(model_type: str, **settings: Any) -> Any:
    """Return a random tiny model in float64."""
    config = CONFIG_MAPPING[model_type]()
    taken = {name: value for name, value in TINY.items() if name in config.to_dict()}
    torch.manual_seed(0)
    tiny_config = CONFIG_MAPPING[model_type](**(taken | settings))
    return transformers.AutoModelForCausalLM.from_config(tiny_config).double().eval()


def attends_to_later_tokens(model: Any) -> bool:
    first = torch.arange(5, 37)[None]
    second = first.clone()
    second[0, -1] = 4
    with torch.no_grad():
        rows = [model(input_ids=ids, use_cache=False).logits[0, 0] for ids in (first, second)]
    return bool((rows[0] - rows[1]).abs().max() > 0)


DECODES_IF_SET = [
    model_type
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type in CONFIG_MAPPING
    and getattr(CONFIG_MAPPING[model_type], "is_decoder", None) is False
    and not getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False)
]
NOT_CAUSAL_IN_5_17 = {"big_bird", "megatron-bert", "rembert", "roformer"}
"""Models that transformers 5.17 computes without a causal mask, whatever `is_decoder` is; the
forward passes at loading show it for weights of trained size."""

CASES = [(name, {"is_decoder": value}) for name in DECODES_IF_SET for value in (False, True)]
CASES.remove(("reformer", {"is_decoder": False}))  # transformers does not build it
CASES += [("xlm", {"causal": value}) for value in (False, True)]
CASES += [
    (name, {"use_bidirectional_attention": value})
    for name in ("gemma", "gemma2", "gemma3_text")
    for value in (False, True)
]
CASES += [("gemma4_text", {"use_bidirectional_attention": value}) for value in (None, "all")]
CASES += [("llama", {"is_causal": value}) for value in (False, True)]
CASES += [("xlnet", {})]


@pytest.mark.parametrize(
    ("model_type", "settings"),
    CASES,
    ids=lambda argument: str(argument).strip("{}").replace("'", ""),
)
def test_a_config_says_whether_tokens_attend_to_later_ones(
    model_type: str, settings: dict[str, Any]
) -> None:
    model = build(model_type, **settings)
    facts = ModelFacts.of(model.config)
    if (model_type, settings) == ("gemma2", {"use_bidirectional_attention": True}):
        assert facts.bidirectional  # newer releases of transformers ignore the setting
    elif model_type in NOT_CAUSAL_IN_5_17 and transformers.__version__.startswith("5.17."):
        assert attends_to_later_tokens(model)
    else:
        assert bool(facts.bidirectional) == attends_to_later_tokens(model)


@pytest.mark.parametrize("model_type", sorted(NOT_CAUSAL_IN_5_17))
def test_a_decoder_is_served_unless_transformers_computes_it_without_a_causal_mask(
    tokenizer: Any, model_type: str
) -> None:
    model = build(model_type, is_decoder=True, vocab_size=WIDTH).float()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    if transformers.__version__.startswith("5.17."):
        with pytest.raises(ModelLoadError, match="changes with the tokens that follow"):
            HFEngine.from_model(model, tokenizer)
    else:
        HFEngine.from_model(model, tokenizer).close()


def test_a_model_with_small_weights_is_refused_by_its_config(tokenizer: Any) -> None:
    model = build("bert", is_decoder=False).float()
    with torch.no_grad():
        for parameter in model.bert.encoder.parameters():
            parameter.mul_(1e-3)  # two forward passes would not show it
    with pytest.raises(ModelLoadError, match="is_decoder=False attends"):
        HFEngine.from_model(model, tokenizer)


def test_a_checkpoint_is_refused_before_its_weights_unless_the_setting_is_changed(
    tokenizer: Any, tmp_path: Any
) -> None:
    build("bert", is_decoder=False, vocab_size=WIDTH).float().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="is_decoder=False"):
        HFEngine(str(tmp_path))
    HFEngine(str(tmp_path), hf_opts={"is_decoder": True}).close()
