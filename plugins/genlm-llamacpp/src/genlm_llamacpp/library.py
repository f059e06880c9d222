"""The part of llama.cpp's C interface that the engine uses, declared for ctypes.

The shared library of the `xllamacpp` wheel exports llama.cpp; its Python code is not imported.
Structs are passed by value and change silently between versions: if a field is missing, options
are read from wrong offsets. `llama` therefore accepts one version only, and `LlamaContext`
compares a context with the requested options.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from genlm.plugin import ModelLoadError, supported_version

VERSION: Final = "2026.10.11549"
"""The version of xllamacpp whose llama.h is declared here."""

_i32, _u32, _f32, _bool, _size = (
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_float,
    ctypes.c_bool,
    ctypes.c_size_t,
)
_pointer, _text = ctypes.c_void_p, ctypes.c_char_p


class ModelParams(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = (
        ("devices", _pointer),
        ("tensor_buft_overrides", _pointer),
        ("n_gpu_layers", _i32),
        ("split_mode", _i32),
        ("load_mode", _i32),
        ("lazy_mode", _i32),
        ("main_gpu", _i32),
        ("tensor_split", ctypes.POINTER(_f32)),
        ("progress_callback", _pointer),
        ("progress_callback_user_data", _pointer),
        ("kv_overrides", _pointer),
        ("vocab_only", _bool),
        ("check_tensors", _bool),
        ("use_extra_bufts", _bool),
        ("no_host", _bool),
        ("no_alloc", _bool),
        ("load_mtp", _bool),
    )


class ContextParams(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = (
        ("n_ctx", _u32),
        ("n_batch", _u32),
        ("n_ubatch", _u32),
        ("n_seq_max", _u32),
        ("n_rs_seq", _u32),
        ("n_outputs_max", _u32),
        ("n_outputs_max_per_seq", _u32),
        ("n_threads", _i32),
        ("n_threads_batch", _i32),
        ("ctx_type", _i32),
        ("rope_scaling_type", _i32),
        ("pooling_type", _i32),
        ("attention_type", _i32),
        ("flash_attn_type", _i32),
        ("rope_freq_base", _f32),
        ("rope_freq_scale", _f32),
        ("yarn_ext_factor", _f32),
        ("yarn_attn_factor", _f32),
        ("yarn_beta_fast", _f32),
        ("yarn_beta_slow", _f32),
        ("yarn_orig_ctx", _u32),
        ("defrag_thold", _f32),
        ("cb_eval", _pointer),
        ("cb_eval_user_data", _pointer),
        ("type_k", _i32),
        ("type_v", _i32),
        ("moe_cache_size", _size),
        ("abort_callback", _pointer),
        ("abort_callback_data", _pointer),
        ("embeddings", _bool),
        ("offload_kqv", _bool),
        ("no_perf", _bool),
        ("op_offload", _bool),
        ("swa_full", _bool),
        ("kv_unified", _bool),
        ("samplers", _pointer),
        ("n_samplers", _size),
        ("ctx_other", _pointer),
    )


class Batch(ctypes.Structure):
    """`llama_batch`: pointers to arrays of one entry for each token."""

    _fields_ = (
        ("n_tokens", _i32),
        ("token", _pointer),
        ("embd", _pointer),
        ("pos", _pointer),
        ("n_seq_id", _pointer),
        ("seq_id", _pointer),
        ("logits", _pointer),
    )


_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    # name: (result, arguments...)
    "llama_backend_init": (None,),
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (_pointer, _text, ModelParams),
    "llama_model_free": (None, _pointer),
    "llama_init_from_model": (_pointer, _pointer, ContextParams),
    "llama_free": (None, _pointer),
    "llama_max_devices": (_size,),
    "llama_n_ctx": (_u32, _pointer),
    "llama_n_ctx_seq": (_u32, _pointer),
    "llama_n_batch": (_u32, _pointer),
    "llama_n_seq_max": (_u32, _pointer),
    "llama_n_threads": (_i32, _pointer),
    "llama_get_memory": (_pointer, _pointer),
    "llama_model_get_vocab": (_pointer, _pointer),
    "llama_model_n_ctx_train": (_i32, _pointer),
    "llama_model_n_layer": (_i32, _pointer),
    "llama_model_n_head": (_i32, _pointer),
    "llama_model_n_head_kv": (_i32, _pointer),
    "llama_model_n_embd": (_i32, _pointer),
    "llama_model_n_swa": (_i32, _pointer),
    "llama_model_has_encoder": (_bool, _pointer),
    "llama_model_is_recurrent": (_bool, _pointer),
    "llama_model_is_hybrid": (_bool, _pointer),
    "llama_model_is_diffusion": (_bool, _pointer),
    "llama_model_meta_val_str": (_i32, _pointer, _text, _text, _size),
    "llama_model_desc": (_i32, _pointer, _text, _size),
    "llama_model_chat_template": (_text, _pointer, _text),
    "llama_vocab_type": (_i32, _pointer),
    "llama_vocab_n_tokens": (_i32, _pointer),
    "llama_vocab_get_text": (_text, _pointer, _i32),
    "llama_vocab_get_attr": (_i32, _pointer, _i32),
    "llama_vocab_bos": (_i32, _pointer),
    "llama_vocab_eos": (_i32, _pointer),
    "llama_tokenize": (_i32, _pointer, _text, _i32, _pointer, _i32, _bool, _bool),
    "llama_token_to_piece": (_i32, _pointer, _i32, _pointer, _i32, _i32, _bool),
    "llama_memory_seq_rm": (_bool, _pointer, _i32, _i32, _i32),
    "llama_memory_seq_cp": (None, _pointer, _i32, _i32, _i32, _i32),
    "llama_memory_seq_pos_min": (_i32, _pointer, _i32),
    "llama_memory_seq_pos_max": (_i32, _pointer, _i32),
    "llama_decode": (_i32, _pointer, Batch),
    "llama_get_logits": (_pointer, _pointer),
    "llama_adapter_lora_init": (_pointer, _pointer, _text),
    "llama_adapter_lora_free": (None, _pointer),
    "llama_adapter_get_alora_n_invocation_tokens": (ctypes.c_uint64, _pointer),
    "llama_set_adapters_lora": (_i32, _pointer, _pointer, _size, _pointer),
    "llama_log_set": (None, _pointer, _pointer),
}

_WARNING, _CONTINUED = 3, 5  # ggml_log_level; a message may come in several parts

_messages: deque[str] = deque(maxlen=8)


@ctypes.CFUNCTYPE(None, ctypes.c_int, _text, _pointer)  # type: ignore[untyped-decorator]
def _on_message(level: int, text: bytes | None, _: object) -> None:
    """Keep warnings and errors for the messages of exceptions; print nothing."""
    if level >= _WARNING and level != _CONTINUED and text:
        _messages.append(text.decode(errors="replace").strip())


def recent_messages() -> str:
    """Return the last warnings and errors of llama.cpp, and forget them."""
    messages = "; ".join(dict.fromkeys(_messages))
    _messages.clear()
    return messages or "llama.cpp gave no reason"


@functools.cache
def llama() -> Any:
    """Load llama.cpp, declare its functions, and initialise it.

    Returns:
        A `ctypes.CDLL`; its functions release the interpreter's lock while they run.

    Raises:
        MissingRequirementError: Another version is installed.
        ModelLoadError: The shared library does not export llama.cpp, as on Windows.
    """
    supported = f"=={VERSION}"  # includes builds for GPUs, which have a suffix
    install = f"pip install xllamacpp{supported}"
    supported_version("genlm-llamacpp", ["xllamacpp"], supported, install)
    library = ctypes.CDLL(str(_shared_library()))
    for name, (result, *arguments) in _SIGNATURES.items():
        function: Callable[..., Any] | None = getattr(library, name, None)
        if function is None:
            raise ModelLoadError(
                f"{_shared_library()} does not export {name}. The builds of xllamacpp for "
                f"Windows export no function of llama.cpp; use Linux (also in WSL) or macOS"
            )
        function.restype = result  # type: ignore[attr-defined]
        function.argtypes = arguments  # type: ignore[attr-defined]
    library.llama_log_set(_on_message, None)
    library.llama_backend_init()
    return library


def metadata(model: Any, key: str) -> str | None:
    """Return a value of the file of a loaded model, None if it has none."""
    text = ctypes.create_string_buffer(128)
    length = llama().llama_model_meta_val_str(model, key.encode(), text, len(text))
    return text.value.decode(errors="replace") if length >= 0 else None


def _shared_library() -> Path:
    spec = importlib.util.find_spec("xllamacpp")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in map(Path, folders):
        for file in sorted(folder.glob("xllamacpp.*")):
            if file.suffix in {".so", ".pyd"}:
                return file
    raise ModelLoadError(
        f"xllamacpp has no shared library in {list(map(str, folders))}; reinstall it: "
        f"pip install --force-reinstall xllamacpp=={VERSION}"
    )
