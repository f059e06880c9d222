"""Writes small checkpoints of transformers, and LoRA adapters of peft, as GGUF.

It is used for the demo model, `genlm check` and tests; llama.cpp's `convert_hf_to_gguf.py` and
`convert_lora_to_gguf.py` convert other models. It requires the package `gguf`, which names the
tensors. Tensors that GGUF stores in another form are changed as by llama.cpp's converters
(https://github.com/ggml-org/llama.cpp/tree/master/conversion).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file

from genlm_llamacpp.files import adapter_settings

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # gguf.TokenType

ARCHITECTURES = {
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""Supported architectures by the `model_type` of their configs."""


def write_model(
    folder: Path, file: Path, *, weights: str = "F32", split_max_tensors: int = 0
) -> None:
    """Write a checkpoint with a byte-level tokenizer as GGUF.

    Args:
        folder: Folder with `config.json`, safetensors, and `tokenizer.json`.
        file: The file to write; parts of a split model are named after it.
        weights: Type of the matrices, such as `"F32"` or `"Q8_0"`; vectors are float32, and
            so are matrices whose rows cannot be divided into blocks.
        split_max_tensors: Maximum number of tensors per file, 0 for one file.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(
        file, _architecture_name(config), split_max_tensors=split_max_tensors
    )
    quantization = gguf.GGMLQuantizationType[weights]
    writer.add_file_type(gguf.LlamaFileType[_file_type(weights)])
    for name, value in _settings(config).items():
        getattr(writer, f"add_{name}")(value)
    _add_tokenizer(writer, folder, config.vocab_size)
    for name, tensor in _tensors(folder, config):
        array = tensor.float().contiguous().numpy()
        is_divisible = array.shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0] == 0
        is_matrix = array.ndim > 1 and "conv1d" not in name
        if weights == "F32" or not (is_matrix and is_divisible):
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, quantization), raw_dtype=quantization)
    _finish(writer)


def write_adapter(folder: Path, file: Path, config: Any) -> None:
    """Write a LoRA adapter of peft as GGUF.

    Args:
        folder: Folder with `adapter_config.json` and `adapter_model.safetensors`.
        file: The file to write.
        config: transformers config of the model.

    Raises:
        AdapterError: The adapter has settings that GGUF does not store.
    """
    settings = adapter_settings(folder.name, folder)
    names = _names(config)
    writer = gguf.GGUFWriter(file, _architecture_name(config))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(settings["lora_alpha"]))
    is_permuted = config.model_type == "llama"
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        path, _, which = key.removeprefix("base_model.model.").rpartition(".lora_")
        permute = is_permuted and which == "B.weight"  # the rows of the product
        factor = _convert_llama(config, f"{path}.weight", tensor) if permute else tensor
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


def _architecture_name(config: Any) -> str:
    return str(gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]])


def _names(config: Any) -> Callable[[str], str]:
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)

    def name(key: str) -> str:
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ValueError(f"gguf has no name for the tensor {key!r}")
        return str(gguf_name)

    return name


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    name = _names(config)
    conversions: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
        "gemma2": _convert_gemma,
        "gpt2": _convert_gpt2,
        "llama": functools.partial(_convert_llama, config),
        "mamba": _convert_mamba,
    }
    convert = conversions.get(config.model_type)
    for file in sorted(folder.glob("model*.safetensors")):
        for key, tensor in load_file(file).items():
            if key != "lm_head.weight" or not config.tie_word_embeddings:
                yield name(key), tensor if convert is None else convert(key, tensor)


def _convert_gemma(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Store norm weights as factors, not as differences from one."""
    return tensor + 1 if key.endswith("norm.weight") else tensor


def _convert_gpt2(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Store matrices as (out, in)."""
    is_transposed = key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.T if is_transposed else tensor


def _convert_llama(config: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Make the two dimensions of each rotary pair adjacent."""
    if key.endswith("q_proj.weight"):
        heads = config.num_attention_heads
    elif key.endswith("k_proj.weight"):
        heads = config.num_key_value_heads
    else:
        return tensor
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape_as(tensor)


def _convert_mamba(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Store A itself, and the convolution without its dimension of size one."""
    if key.endswith("A_log"):
        return -tensor.exp()
    return tensor.squeeze(1) if key.endswith("conv1d.weight") else tensor


def _settings(config: Any) -> dict[str, Any]:
    """Return the metadata of an architecture, by the names of the writer's methods."""
    model_type, width = config.model_type, config.hidden_size
    if model_type == "mamba":
        return {
            "context_length": 2**20,  # Mamba has no limit; value of the converter
            "embedding_length": width,
            "feed_forward_length": 0,
            "head_count": 0,
            "block_count": config.num_hidden_layers,
            "ssm_conv_kernel": config.conv_kernel,
            "ssm_inner_size": config.intermediate_size,
            "ssm_state_size": config.state_size,
            "ssm_time_step_rank": config.time_step_rank,
            "layer_norm_rms_eps": config.layer_norm_epsilon,
            "ssm_dt_b_c_rms": False,
        }
    heads = config.num_attention_heads
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": width,
    }
    if model_type == "gpt2":
        return settings | {
            "feed_forward_length": config.n_inner or 4 * width,
            "head_count": heads,
            "layer_norm_eps": config.layer_norm_epsilon,
        }
    head_dim = getattr(config, "head_dim", None) or width // heads
    settings |= {
        "feed_forward_length": config.intermediate_size,
        "head_count": heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_dimension_count": head_dim,
        "rope_freq_base": float(config.rope_parameters["rope_theta"]),
        "layer_norm_rms_eps": config.rms_norm_eps,
    }
    if model_type == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
            settings[name] = getattr(config, name)
    return settings


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """Write the tables of a byte-level BPE tokenizer; ids beyond it are padding."""
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = json.loads(loaded.backend_tokenizer.to_str())
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise ValueError(f"only byte-level BPE is written; found {model['type']}")
    texts = {index: text for text, index in model["vocab"].items()}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    token_types = [
        _CONTROL if i in added else _NORMAL if i in texts else _UNUSED for i in range(size)
    ]
    texts = texts | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(token_types)
    special = gguf.SpecialVocab(folder, True, special_token_types=("bos", "eos", "pad"))
    special.add_to_gguf(writer, quiet=True)
