"""Writes small checkpoints of transformers, and LoRA adapters of peft, as GGUF.

For the demo model, `genlm check` and tests; llama.cpp's own `convert_hf_to_gguf.py` and
`convert_lora_to_gguf.py` convert other models. Needs the package `gguf`, which names the
tensors; what each architecture stores in another form follows that converter
(https://github.com/ggml-org/llama.cpp/tree/master/conversion).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file

__all__ = ["ARCHITECTURES", "write_adapter", "write_model"]

_Config = Mapping[str, Any]

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # gguf.TokenType

ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""The architectures that are written, by the `model_type` of their configs."""


def write_model(
    folder: Path, file: Path, *, weights: str = "F32", split_max_tensors: int = 0
) -> None:
    """Write a checkpoint with a byte-level tokenizer as GGUF.

    Args:
        folder: Has `config.json`, safetensors, and `tokenizer.json`.
        file: The file to write; parts of a split model are named after it.
        weights: Type of the matrices, such as `"F32"` or `"Q8_0"`; vectors are float32, and
            so are matrices whose rows cannot be divided into blocks.
        split_max_tensors: Maximum number of tensors per file, 0 for one file.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(
        file, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_max_tensors
    )
    kind = gguf.GGMLQuantizationType[weights]
    writer.add_file_type(gguf.LlamaFileType[_file_type(weights)])
    _add_settings(writer, config)
    _add_tokenizer(writer, folder, config)
    for name, tensor in _tensors(folder, config, architecture):
        array = tensor.float().contiguous().numpy()
        is_divisible = array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        is_matrix = array.ndim > 1 and "conv1d" not in name
        if weights == "F32" or not (is_matrix and is_divisible):
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    _finish(writer)


def write_adapter(folder: Path, file: Path, config: _Config) -> None:
    """Write a LoRA adapter of peft as GGUF.

    Args:
        folder: Has `adapter_config.json` and `adapter_model.safetensors`.
        file: The file to write.
        config: Config of the model.
    """
    settings = json.loads((folder / "adapter_config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    names = _names(config, architecture)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    is_permuted = config["model_type"] == "llama"
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        path, _, which = key.removeprefix("base_model.model.").rpartition(".lora_")
        permute = is_permuted and which == "B.weight"  # the rows of the product
        factor = _of_llama(config, f"{path}.weight", tensor) if permute else tensor
        name = f"{names(f'{path}.weight')}.lora_{which[0].lower()}"
        writer.add_tensor(name, factor.float().contiguous().numpy())
    _finish(writer)


def _file_type(weights: str) -> str:
    return {"F32": "ALL_F32"}.get(weights, f"MOSTLY_{weights}")


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _names(config: _Config, architecture: gguf.MODEL_ARCH) -> Callable[[str], str]:
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(architecture, layers)

    def name(key: str) -> str:
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"gguf has no name for the tensor {key!r}")
        return str(found)

    return name


def _tensors(
    folder: Path, config: _Config, architecture: gguf.MODEL_ARCH
) -> Iterator[tuple[str, torch.Tensor]]:
    name, change = _names(config, architecture), _changes(config)
    for file in sorted(folder.glob("model*.safetensors")):
        for key, tensor in load_file(file).items():
            if key == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            yield name(key), change(key, tensor)


def _changes(config: _Config) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return the conversions of the tensors of an architecture."""
    return {
        "gemma2": _of_gemma,
        "gpt2": _of_gpt2,
        "llama": lambda key, tensor: _of_llama(config, key, tensor),
        "mamba": _of_mamba,
    }.get(config["model_type"], lambda _, tensor: tensor)


def _of_gemma(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Store norm weights as factors, not as differences from one."""
    return tensor + 1 if key.endswith("norm.weight") else tensor


def _of_gpt2(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Store matrices as (out, in)."""
    is_transposed = key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.T if is_transposed else tensor


def _of_llama(config: _Config, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Put the two numbers that rotary embeddings rotate together next to each other."""
    if key.endswith("q_proj.weight"):
        heads = config["num_attention_heads"]
    elif key.endswith("k_proj.weight"):
        heads = config["num_key_value_heads"]
    else:
        return tensor
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape_as(tensor)


def _of_mamba(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Store A itself, and the convolution without its dimension of size one."""
    if key.endswith("A_log"):
        return -tensor.exp()
    return tensor.squeeze(1) if key.endswith("conv1d.weight") else tensor


def _add_settings(writer: gguf.GGUFWriter, config: _Config) -> None:
    kind = config["model_type"]
    if kind == "mamba":
        _add_mamba(writer, config)
        return
    if kind == "gpt2":
        width, heads = config["n_embd"], config["n_head"]
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_head_count(heads)
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float((config.get("rope_parameters") or {})["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


def _add_mamba(writer: gguf.GGUFWriter, config: _Config) -> None:
    writer.add_context_length(2**20)  # it has no limit; the converter's value
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_dt_b_c_rms(False)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: _Config) -> None:
    """Write the tables of a byte-level BPE tokenizer; ids beyond it are padding."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = json.loads(loaded.backend_tokenizer.to_str())
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise ValueError(f"only byte-level BPE is written; found {model['type']}")
    texts = {index: text for text, index in model["vocab"].items()}
    added = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    kinds = [
        _CONTROL if i in added else _NORMAL if i in texts else _UNUSED for i in range(size)
    ]
    texts = texts | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    )
    for role, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if config.get(f"{role}_token_id") is not None:
            add(config[f"{role}_token_id"])
