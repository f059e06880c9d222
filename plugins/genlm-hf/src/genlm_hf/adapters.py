"""LoRA adapters through peft: loaded into one model, one of them at work at a time.

peft puts its layers into the model itself. Here they are put there so that a
failure leaves no trace, that the bare model keeps its answers, and that all can be
taken out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from genlm import AdapterError

__all__ = ["Adapters"]

# The other ways of initialising change the weights of the base model.
_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")


class Adapters:
    """The adapters of one model; without any, the model is untouched."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft_model: Any = None
        self._bare: _Snapshot | None = None
        self._inner_names: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, oldest first."""
        return tuple(self._inner_names)

    def load(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`, to be known as `name`.

        Raises:
            AdapterError: The name is taken, the folder holds no LoRA adapter, or
                the adapter does not fit the model. The model stays as it was.
        """
        if name in self._inner_names:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; take another name"
            )
        folder = str(Path(path).expanduser())
        config = _read_config(name, folder)
        # peft forbids some names (dots, for one), so it never sees the user's.
        inner = f"genlm_{len(self._inner_names)}"
        before = _Snapshot(self._model)
        try:
            peft_model = self._inject(inner, config)
            report = peft_model.load_adapter(
                folder, inner, torch_device="cpu", low_cpu_mem_usage=True
            )
            _refuse_misfit(report, before.put_weights_back())
        except Exception as error:
            self._roll_back(inner, before)
            base, cause = type(self._model).__name__, " ".join(str(error).split())
            raise AdapterError(
                f"adapter {name!r} in {path!r} does not fit this {base}: {cause}"
            ) from error
        self._bare = self._bare or before
        self._peft_model = peft_model
        self._inner_names[name] = inner

    @contextmanager
    def at_work(self, name: str | None) -> Iterator[None]:
        """Let adapter `name`, or none of them, take part in forward passes here."""
        if self._peft_model is None:
            yield
        elif name is None:
            with self._peft_model.disable_adapter():
                yield
        else:
            self._peft_model.set_adapter(self._inner_names[name], inference_mode=True)
            yield

    def unload(self) -> None:
        """Take every adapter out; the model is as it was before the first."""
        self._peft_model = None
        self._inner_names.clear()
        if self._bare is not None:
            self._bare.restore()
            self._bare = None

    def _inject(self, inner: str, config: Any) -> Any:
        import peft

        if self._peft_model is None:
            return peft.PeftModel(self._model, config, inner, low_cpu_mem_usage=True)
        self._peft_model.add_adapter(inner, config, low_cpu_mem_usage=True)
        return self._peft_model

    def _roll_back(self, inner: str, before: _Snapshot) -> None:
        if self._peft_model is not None and inner in self._peft_model.peft_config:
            self._peft_model.delete_adapter(inner)
        before.restore()


class _Snapshot:
    """The modules that a model consists of, and which parameters are trainable."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._children = {m: dict(m.named_children()) for m in model.modules()}
        self._weights = {m: dict(m.named_parameters(recurse=False)) for m in model.modules()}
        self._trainable = {p: p.requires_grad for p in model.parameters()}
        self._has_config = hasattr(model, "peft_config")

    def put_weights_back(self) -> list[str]:
        """Undo the replacing of parameters; return the names of those that differed.

        Adapters of embeddings are saved together with a copy of the base model's
        weights, which peft puts in place of the model's own.
        """
        differing = []
        for module, weights in self._weights.items():
            for name, weight in weights.items():
                found = getattr(module, name)
                if found is not weight and not _same_but_for_rounding(found, weight):
                    differing.append(f"{type(module).__name__}.{name}")
                setattr(module, name, weight)
        return differing

    def restore(self) -> None:
        """Put the same modules and weights back into the same places."""
        self.put_weights_back()
        for module, children in self._children.items():
            for name, child in children.items():
                setattr(module, name, child)
        for parameter, trainable in self._trainable.items():
            parameter.requires_grad_(trainable)
        if not self._has_config and hasattr(self._model, "peft_config"):
            del self._model.peft_config


def _read_config(name: str, path: str) -> Any:
    import peft

    folder = Path(path)
    weights = [folder / f"adapter_model.{suffix}" for suffix in ("safetensors", "bin")]
    if not (folder / "adapter_config.json").is_file() or not any(w.is_file() for w in weights):
        raise AdapterError(
            f"adapter {name!r}: {path!r} is no folder with adapter_config.json and "
            f"adapter_model.safetensors, as peft's save_pretrained writes it"
        )
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AdapterError(
            f"adapter {name!r}: {path!r} has no valid config: {error}"
        ) from error
    problem = _unsupported(config)
    if problem is not None:
        raise AdapterError(f"adapter {name!r} in {path!r} {problem}")
    config.inference_mode = True
    return config


def _unsupported(config: Any) -> str | None:
    """Return why an adapter cannot be switched per request, None if it can."""
    if config.peft_type != "LORA":
        return f"is of type {config.peft_type}; only LORA adapters can be served"
    if config.bias != "none":
        return f"has bias={config.bias!r}, which would change the base model's answers too"
    if config.init_lora_weights not in _HARMLESS_INITS:
        return (
            f"was initialised with {config.init_lora_weights!r}, which changes the base model; "
            f"convert it to a plain LoRA (path_initial_model_for_weight_conversion of "
            f"peft's save_pretrained)"
        )
    for option in ("layer_replication", "alora_invocation_tokens"):
        if getattr(config, option, None):
            return f"uses {option}, which cannot be switched per request"
    return None


def _same_but_for_rounding(left: torch.Tensor, right: torch.Tensor) -> bool:
    # The copy may have been saved in another precision than the model is loaded in.
    left, right = left.detach().float().cpu(), right.detach().float().cpu()
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-2, atol=1e-4)


def _refuse_misfit(report: Any, replaced: list[str]) -> None:
    if replaced:
        raise ValueError(
            f"it brings weights of the base model that are not this model's ({replaced[0]}); "
            f"it was trained with another base model or changed its embeddings"
        )
    if report.missing_keys or report.unexpected_keys:
        names = [*report.missing_keys, *report.unexpected_keys]
        raise ValueError(
            f"it lacks {len(report.missing_keys)} weights that the model needs and has "
            f"{len(report.unexpected_keys)} that the model has no place for, such as "
            f"{names[0]}; it was made for another base model"
        )
