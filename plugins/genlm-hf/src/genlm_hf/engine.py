"""`HFEngine`: Hugging Face transformers models as a genlm engine."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Self

import torch

from genlm.plugin import (
    Capability,
    Completion,
    ModelLoadError,
    Vocabulary,
    context_window,
    free_memory_bytes,
)
from genlm.prefix import PrefixEngine, ServeOptions
from genlm_hf.adapters import Adapters
from genlm_hf.execution_paths import PATHS, choose_execution_path, use_kernels
from genlm_hf.forward import current_device
from genlm_hf.loading import LoadOptions, check_decoder, load_checkpoint
from genlm_hf.prepacked import PrepackedWeights
from genlm_hf.quantised import preserve_packed_weights
from genlm_hf.served_model import (
    ServedModel,
    embedding_rows,
    input_device,
    is_offloaded,
)
from genlm_hf.weight_versions import WeightVersion, WeightVersions
from genlm_hf.weights import load_weights

# 2048 tokens saturate a CPU core, so longer passes only delay other requests.
_TOKENS_PER_BATCH = 8192
_TOKENS_PER_BATCH_ON_CPU = 2048

# Maximum logits of one pass on a CPU: 256 MiB in float32. Other devices use an eighth of the
# memory that the weights leave free, because a second pass reads all weights again.
_LOGITS_PER_BATCH_ON_CPU = 2**26
_SHARE_OF_LOGITS = 1 / 8
_BYTES_PER_LOGIT = 8  # in the model's dtype and in float32


class HFEngine(PrefixEngine):
    """Next-token rows of a decoder-only transformers model.

    A row does not depend, beyond rounding, on the other sequences of its batch. Rows are on
    the model's device.

    Args:
        model: `"demo"` (a small packaged model), a folder, or a hub id.
        device: Device of the model, such as `"cpu"` or `"cuda:1"`. The default is the first
            CUDA device if there is one, else the CPU.
        dtype: A torch dtype, its name, or `"auto"` for that of the checkpoint. The default is
            float32 on the CPU and `"auto"` on other devices.
        hf_opts: Further arguments of transformers' `from_pretrained`, such as
            `device_map`, `attn_implementation`, `revision` or `token`.
        bitsandbytes_opts: Arguments of `BitsAndBytesConfig`.
        trust_remote_code: Whether code that comes with the model may be run.
        max_tokens_per_batch: Maximum number of positions, padding included, in one forward
            pass. The default is 2048 on a CPU and 8192 on other devices. Longer contexts take
            several passes; without a cache, each of them takes a separate pass.
        kv_budget_bytes: Maximum memory for cached keys and values. The default is a quarter of
            the free memory, or half of that of a CUDA device.
        execution_path: `"packed"`, `"slot_cache"`, `"padded"`, or None for the fastest path
            that gives the right rows.
        self_test: Whether to compare the execution path with unbatched forward passes of a
            few short sequences when the model is loaded.
        prepack: Whether linear layers on a CPU keep a second copy of their weights in oneDNN's
            fastest layout. The copy is made if it fits into a quarter of the free memory.
        cuda_graphs: Whether steps of up to 1,024 tokens are replayed from CUDA graphs. Each
            padded number of tokens is captured when it occurs for the second time and compared
            once with the step without a graph. Hooks of the model do not run in replayed
            steps. Graphs require Triton and the execution path `"packed"` on one CUDA device.
            With None, steps are replayed if these requirements are met; True raises an error
            if they are not. The default of `from_model` is False.

    Raises:
        ModelLoadError: The model does not exist or cannot be served.
        MissingRequirementError: A library that the model or an option needs is
            missing.
        VocabularyError: The tokenizer cannot be decoded to exact bytes.
        ValueError: Options contradict each other or do not exist.
    """

    backend = "hf"

    option_homes: ClassVar[Mapping[str, str]] = {
        "bnb_": "bitsandbytes_opts",
        "llm_int8_": "bitsandbytes_opts",
        "load_in_": "bitsandbytes_opts",
        "device_map": "hf_opts",
        "torch_dtype": "dtype",
        "": "hf_opts",
    }

    _adapters: Adapters
    _evaluation = ExitStack()  # restores the modes of a model object in `close`
    _weights: WeightVersions | None = None  # of a model object
    _weight_version = WeightVersion()  # with which the cached tokens were computed

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        hf_opts: Mapping[str, Any] | None = None,
        bitsandbytes_opts: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        max_tokens_per_batch: int | None = None,
        kv_budget_bytes: int | None = None,
        execution_path: str | None = None,
        self_test: bool = True,
        prepack: bool = True,
        cuda_graphs: bool | None = None,
    ) -> None:
        serving = ServeOptions(
            paths=PATHS,
            max_tokens_per_batch=max_tokens_per_batch,
            kv_budget_bytes=kv_budget_bytes,
            execution_path=execution_path,
            self_test=self_test,
        )
        options = LoadOptions(device, dtype, hf_opts, bitsandbytes_opts, trust_remote_code)
        loaded, tokenizer = load_checkpoint(model, options)
        self._serve(loaded, tokenizer, serving, prepack=prepack, cuda_graphs=cuda_graphs)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        max_tokens_per_batch: int | None = None,
        kv_budget_bytes: int | None = None,
        execution_path: str | None = None,
        self_test: bool = True,
        prepack: bool = False,
        cuda_graphs: bool = False,
    ) -> Self:
        """Serve a model and tokenizer that the caller created.

        The engine owns the model until `close`: it sets evaluation mode, inserts the adapters
        that it loads, and replaces attention functions and forward methods during a pass. The
        caller keeps the model on its device and must not run or train it while the engine
        steps. Between steps the model may be trained, because steps use evaluation mode even
        after `model.train()`. The next request uses the new weights: results, keys and values
        of earlier weights are dropped, pinned prefixes included, and weights are prepacked
        again. Changes that torch does not count, such as `parameter.data.add_(1)`, are not
        detected; call `update_weights` after them. Hooks of the model run in the engine's
        passes too.

        A model with peft adapters, or a `peft.PeftModel`, is served with its current state:
        rows of queries without an adapter have the adapters applied that are active or merged
        at that time, and queries can name any of its adapters unless some are merged.

        Raises:
            ModelLoadError: The model is not of transformers, an encoder-decoder or not a causal
                language model, or has adapters that act outside of its layers.
            VocabularyError: The tokenizer cannot be decoded to exact bytes.
        """
        if not hasattr(model, "config"):
            raise ModelLoadError(
                f"{type(model).__name__} is not a model of transformers; if it contains one, "
                f"as DistributedDataParallel does, pass that model, such as model.module"
            )
        check_decoder(model.config, type(model).__name__)
        serving = ServeOptions(
            paths=PATHS,
            max_tokens_per_batch=max_tokens_per_batch,
            kv_budget_bytes=kv_budget_bytes,
            execution_path=execution_path,
            self_test=self_test,
        )
        engine = cls.__new__(cls)
        with ExitStack() as evaluation:
            evaluation.enter_context(_evaluation_mode(model))
            engine._serve(  # noqa: SLF001 - the same class
                model, tokenizer, serving, prepack=prepack, cuda_graphs=cuda_graphs
            )
            engine._evaluation = evaluation.pop_all()  # noqa: SLF001
        engine._watch_weights()  # noqa: SLF001
        return engine

    def _serve(
        self,
        model: Any,
        tokenizer: Any,
        options: ServeOptions,
        *,
        prepack: bool,
        cuda_graphs: bool | None,
    ) -> None:
        adapters = Adapters(model)
        model = adapters.model
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer)
        self.max_context = context_window(model.config.get_text_config())
        rows = embedding_rows(model) or self.vocabulary.size
        device = input_device(model)
        on_cpu = device.type == "cpu" and not is_offloaded(model)
        default_tokens = _TOKENS_PER_BATCH_ON_CPU if on_cpu else _TOKENS_PER_BATCH
        max_logits = _LOGITS_PER_BATCH_ON_CPU if on_cpu else _max_logits(device)
        self._served = ServedModel(
            model=model,
            vocabulary=self.vocabulary,
            device=device,
            embedding_rows=rows,
            max_context=self.max_context,
            max_tokens=options.max_tokens_per_batch or default_tokens,
            max_rows=max(1, max_logits // max(rows, self.vocabulary.size)),
        )
        self._loaded_format = _format(model)
        self._prepacked = PrepackedWeights(adapters.modules() if prepack else ())
        self._prepacks = self._prepacked.nbytes > 0
        with current_device(device):
            choice = choose_execution_path(self._served, options)
            self._kernels = use_kernels(choice, graphs=cuda_graphs)
        self.serve(
            choice,
            adapters,
            embedding_rows=rows,
            hints=_hints(model),
            load_weights=functools.partial(load_weights, model),
        )

    def step(self) -> list[Completion]:
        """Compute a batch with the current weights; see `BatchEngine.step`."""
        self._follow_weights()
        return super().step()

    def cache_prefix(self, token_ids: Sequence[int], adapter: str | None) -> None:
        """Compute a prefix and pin it until `clear_prefix_cache` or until weights change."""
        self._follow_weights()
        super().cache_prefix(token_ids, adapter)

    def weights_version(self) -> WeightVersion:
        """Return the version of the weights, which changes only for model objects."""
        weights = self._weights
        return WeightVersion() if weights is None else weights.current()

    def update_weights(self, weights: Mapping[str, Any] | None) -> None:
        """Replace the weights of the base model; see `PrefixEngine.update_weights`.

        Args:
            weights: All weights by their names in `state_dict()` of the model without
                adapters; None if they have been changed in the model, in any way.
        """
        self._check_format()
        super().update_weights(weights)
        if weights is None and self._kernels is not None:  # addresses may have changed
            self._kernels.clear()
        self._prepack_again()
        if self._weights is not None:
            self._watch_weights()

    @contextmanager
    def activate(self, adapter: str | None) -> Iterator[None]:
        """Prepare forward passes: evaluation mode, an adapter, and prepacked weights."""
        model = self._served.model
        with (
            current_device(self._served.device),
            _evaluation_mode(model) if model.training else nullcontext(),
            super().activate(adapter),
            self._prepacked.activate(),
        ):
            yield

    def add_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in folder `path`; queries refer to it by `name`.

        Raises:
            UnsupportedCapabilityError: peft is not installed, or layers are offloaded.
            AdapterError: The name is taken, the folder holds no LoRA adapter, or
                it does not fit the model; the engine is unchanged.
        """
        with preserve_packed_weights(self._served.model):
            super().add_adapter(name, path)
        if self._kernels is not None:
            self._kernels.clear()

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` loaded; adapters that the model came with stay.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        with preserve_packed_weights(self._served.model):
            super().remove_adapter(name)
        if self._kernels is not None:
            self._kernels.clear()

    def model_statistics(self) -> Mapping[str, int | float | str]:
        """Return the model's class, device and dtype, prepacked bytes and counts of graphs."""
        return {
            **({} if self._kernels is None else self._kernels.statistics()),
            "prepacked_bytes": self._prepacked.nbytes,
            "model": type(self._served.model).__name__,
            "device": str(self._served.device),
            "dtype": str(self._served.model.dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        """Remove the engine's adapters from the model and free all cached state.

        A model passed to `from_model` returns to its earlier state, including training mode.
        """
        on_cuda, adapters = self._served.device.type == "cuda", self._adapters
        self._weights = None
        super().close()
        try:
            adapters.unload()
        finally:
            self._evaluation.close()
        del adapters, self._prepacked, self._served, self._kernels
        if on_cuda:
            torch.cuda.empty_cache()

    def _watch_weights(self) -> None:
        self._weights = WeightVersions(self._served.model, self._adapters.version)
        self._weight_version = self._weights.current()

    def _follow_weights(self) -> None:
        """Drop what was computed from earlier weights of a model object."""
        if self._weights is None:
            return
        version, earlier = self._weights.current(), self._weight_version
        if version == earlier:
            return
        self._check_format()
        if self._kernels is not None and version.in_graphs != earlier.in_graphs:
            self._kernels.clear()
        if Capability.PREFIX_CACHE in self.capabilities:
            self.clear_prefix_cache()
        self._prepack_again()
        self._weight_version = version  # last: after an error the next step repeats this

    def _check_format(self) -> None:
        """Raise `ValueError` if the model has another dtype or device than the cache."""
        found = _format(self._served.model)
        if found != self._loaded_format:
            raise ValueError(
                f"the model was loaded in {self._loaded_format} and is in {found} now; close "
                f"it and load the model object again, or change it back"
            )

    def _prepack_again(self) -> None:
        if self._prepacks:
            self._prepacked = PrepackedWeights(())  # frees the copies before others are made
            self._prepacked = PrepackedWeights(self._adapters.modules())


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Use evaluation mode within the context."""
    modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def _format(model: Any) -> str:
    """Describe the dtype and device of a model by its first parameter."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        return "no parameters"
    return f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"


def _max_logits(device: torch.device) -> int:
    """Return the maximum number of logits of a pass on a device."""
    return int(free_memory_bytes(device) * _SHARE_OF_LOGITS) // _BYTES_PER_LOGIT


def _hints(model: Any) -> dict[Capability, str]:
    """Return why a model lacks capabilities, by capability."""
    if is_offloaded(model):
        return {
            Capability.WEIGHTS: "its device_map offloads layers; load the new weights with "
            "load_model",
            Capability.LORA: "its device_map offloads layers, which cannot have adapters; load "
            "all of the model onto devices, for example in 8 or 4 bit",
        }
    if importlib.util.find_spec("peft") is None:
        return {Capability.LORA: "pip install 'genlm-hf[lora]', then load the model again"}
    return {}
