"""Loading of a model and its tokenizer from a name or folder.

Invalid options and models are refused before weights are read where possible. Errors of
transformers are reported as `ModelLoadError` with the requested model.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from genlm.plugin import (
    MissingRequirementError,
    ModelFacts,
    ModelLoadError,
    check_causal,
    describe_error,
    dtype_name,
    loading_stage,
    model_source,
    options_mapping,
)
from genlm_hf.progress import hidden_progress_bars
from genlm_hf.quantised import dedupe_logs, is_quantised

# Files named in the error message for a folder without a model.
_MAX_LISTED_FILES = 12

# Options of `hf_opts` that locate files; config and tokenizer need them too.
_LOCATION_OPTIONS = frozenset(
    {"cache_dir", "force_download", "gguf_file", "local_files_only"}
    | {"proxies", "revision", "subfolder", "token"}
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Loading options; the fields are `HFEngine`'s arguments."""

    device: str | torch.device | None = None
    dtype: str | torch.dtype | None = None
    hf_opts: Mapping[str, Any] | None = None
    bitsandbytes_opts: Mapping[str, Any] | None = None
    trust_remote_code: bool = False


def load_checkpoint(model: str | os.PathLike[str], options: LoadOptions) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        model: `"demo"`, a folder, or the id of a repository on the hub.
        options: See `HFEngine`.

    Returns:
        The model, in evaluation mode, on the device of the options; its tokenizer.

    Raises:
        ModelLoadError: The model does not exist or cannot be served.
        MissingRequirementError: A library that the model or an option needs is missing.
        ValueError: Options contradict each other or do not exist.
        TypeError: `model` is not a name, or an option is not a mapping.
    """
    loading_stage("config and tokenizer")
    import transformers

    source = model_source(model)
    arguments, device = _model_arguments(options)
    location_options = {name: arguments[name] for name in _LOCATION_OPTIONS & arguments.keys()}
    location_options["trust_remote_code"] = arguments.get(
        "trust_remote_code", options.trust_remote_code
    )
    config = _read(transformers.AutoConfig, source, location_options)
    check_decoder(config, source, options.hf_opts)
    tokenizer = _read(transformers.AutoTokenizer, source, location_options)
    if getattr(config, "quantization_config", None) is not None and device is not None:
        arguments["device_map"], device = {"": device}, None
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # torch's attention, transformers' default, does not cap scores.
        arguments.setdefault("attn_implementation", "eager")
    arguments |= {**location_options, "output_loading_info": True}
    shows_progress = loading_stage("weights")
    with nullcontext() if shows_progress else hidden_progress_bars():
        loaded, info = _read(transformers.AutoModelForCausalLM, source, arguments)
    _refuse_random_weights(source, config, info)
    if is_quantised(loaded):
        dedupe_logs()
    return (loaded if device is None else loaded.to(device)).eval(), tokenizer


def check_decoder(config: Any, source: str, changes: Mapping[str, Any] | None = None) -> None:
    """Refuse the model of a config that has an encoder or bidirectional attention.

    Args:
        config: A config of transformers.
        source: Name of the model for the message.
        changes: Arguments of `from_pretrained`, which may change settings of the config.

    Raises:
        ModelLoadError: The model is not a decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{source!r} is an encoder-decoder ({config.model_type}), which has no "
            f"next-token distribution of a sequence alone; use a decoder-only model"
        )
    check_causal(ModelFacts.of({**config.to_dict(), **(changes or {})}))


def _model_arguments(options: LoadOptions) -> tuple[dict[str, Any], torch.device | None]:
    """Return `from_pretrained`'s arguments, and where to move the model afterwards."""
    arguments = dict(options_mapping("hf_opts", options.hf_opts))
    quantisation = options_mapping("bitsandbytes_opts", options.bitsandbytes_opts)
    if "torch_dtype" in arguments:
        if "dtype" in arguments:
            raise ValueError("'dtype' and its old name 'torch_dtype' are both in hf_opts")
        arguments["dtype"] = arguments.pop("torch_dtype")
    for name in ("dtype", "trust_remote_code"):
        if name in arguments and getattr(options, name):
            raise ValueError(f"{name!r} is passed twice, as an argument and in hf_opts")
    has_device_map = "device_map" in arguments
    if has_device_map and options.device is not None:
        raise ValueError("pass either device or hf_opts['device_map'], not both")
    device = None if has_device_map else _device(options.device)
    if has_device_map:
        _require("hf_opts['device_map']", "accelerate", extra="accelerate")
    if quantisation:
        arguments |= _quantisation_arguments(quantisation, arguments, device)
        device = None
    if isinstance(arguments.get("dtype"), str):
        arguments["dtype"] = _dtype(arguments["dtype"], "auto")
    if "dtype" not in arguments:
        on_cpu = (
            arguments.get("device_map") == "cpu" if device is None else device.type == "cpu"
        )
        arguments["dtype"] = _dtype(options.dtype, "float32" if on_cpu else "auto")
    return arguments, device


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"no device {device!r}; examples: 'cpu', 'cuda', 'cuda:1'") from error
    if torch_device.type == "cuda" and (torch_device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device {str(device)!r} is not available; torch finds {torch.cuda.device_count()} "
            f"CUDA devices. Use device='cpu', or a torch built for your GPU"
        )
    try:
        torch.empty(0, device=torch_device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ModelLoadError(
            f"device {str(device)!r} is not available; this torch was not built for "
            f"{torch_device.type}, or finds no such device. Use device='cpu', or another torch"
        ) from error
    return torch_device


def _dtype(dtype: str | torch.dtype | None, default: str) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype  # including those without a common name, such as float8_e4m3fn
    name = dtype_name(default if dtype is None else dtype)
    return name if name == "auto" else cast("torch.dtype", getattr(torch, name))


def _quantisation_arguments(
    options: Mapping[str, Any], arguments: Mapping[str, Any], device: torch.device | None
) -> dict[str, Any]:
    if "quantization_config" in arguments:
        raise ValueError("pass either bitsandbytes_opts or hf_opts['quantization_config']")
    _require(
        f"bitsandbytes_opts={dict(options)}", "bitsandbytes", "accelerate", extra="bitsandbytes"
    )
    import transformers

    config = transformers.BitsAndBytesConfig(**options)
    known = config.to_dict().keys()
    if unknown := sorted(options.keys() - known):  # transformers ignores them
        raise ValueError(
            f"bitsandbytes_opts has {', '.join(unknown)}; BitsAndBytesConfig takes "
            f"{', '.join(sorted(known))}"
        )
    if not (config.load_in_8bit or config.load_in_4bit):  # bitsandbytes would use 4 bit
        raise ValueError(
            f"bitsandbytes_opts={dict(options)} has neither load_in_8bit=True nor "
            f"load_in_4bit=True; add one of them"
        )
    settings = {"quantization_config": config}
    return settings if device is None else {**settings, "device_map": {"": device}}


def _require(option: str, *libraries: str, extra: str) -> None:
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    if missing:
        raise MissingRequirementError(option, missing, f"pip install 'genlm-hf[{extra}]'")


def _read(auto_class: Any, source: str, arguments: Mapping[str, Any]) -> Any:
    """Call `from_pretrained`, reporting failures with the requested model."""
    try:
        return auto_class.from_pretrained(source, **arguments)
    except Exception as error:
        if isinstance(error, ImportError) and error.name:
            raise MissingRequirementError(
                f"model {source!r}", [error.name], "install the package that provides it"
            ) from error
        # The first line states the cause; the next ones list everything transformers supports.
        cause = describe_error(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"cannot load model {source!r}; {auto_class.__name__}.from_pretrained raised "
            f"{cause} ({_advice(source)})"
        ) from error


def _advice(source: str) -> str:
    if Path(source).is_file():
        return "this is a file; pass its folder, and hf_opts={'gguf_file': name} if it is GGUF"
    if Path(source).is_dir():
        names = sorted(path.name for path in Path(source).iterdir())
        listed = ", ".join(names[:_MAX_LISTED_FILES]) or "nothing"
        more = ", ..." if len(names) > _MAX_LISTED_FILES else ""
        return (
            f"the folder contains {listed}{more}; it must contain config.json, weights and "
            f"tokenizer of a decoder-only model; a model with custom code needs "
            f"trust_remote_code=True"
        )
    return (
        "there is no folder of that name; a hub id must exist, be accessible with your token, "
        "and be in the local cache when the hub cannot be reached (HF_HUB_OFFLINE=1 then "
        "avoids the timeout)"
    )


def _refuse_random_weights(source: str, config: Any, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{source!r} lacks {len(missing)} of the weights of a causal language model "
            f"({names}), which would be random; its config names {config.architectures}. "
            f"Use a checkpoint that was saved with its language-model head"
        )
