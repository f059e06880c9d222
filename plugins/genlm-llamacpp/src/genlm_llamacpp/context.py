"""A model and a context of llama.cpp: weights, memory, adapters and `llama_decode`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genlm.plugin import (
    AdapterError,
    EvaluationError,
    ModelLoadError,
    cache_budget_bytes,
    checked_integer,
)
from genlm_llamacpp.batch import Part, TokenBatch
from genlm_llamacpp.library import Batch, llama, metadata, recent_messages

CACHE_TYPES: Mapping[str, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
}
"""ggml's id of each type of keys and values, and its bytes per value."""

_QUANTISED_BLOCK = 32  # values that share a scale, in all quantised types of the cache

_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2}

_DEFAULT_CELLS = 16_384
"""llama.cpp allocates all cells at once, and iterates over all when it copies a sequence."""

_SHARE = 0.25  # default share of free memory for the cells

_CELLS_ROUNDED_TO = 256
"""llama.cpp rounds the number of cells of a sequence up to a multiple of this."""

_LARGEST = {"n_ctx": 2**31 - 1, "n_seq_max": 256, "threads": 512, "threads_batch": 512}
"""Maximum values; llama.cpp does not check the number of threads, and crashes with many."""

_NO_ROOM = 1  # result of llama_decode without room


class CacheFullError(Exception):
    """The cache has no room for a batch; its content is unchanged."""


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Parameters of the model and the context; see `LlamaCppEngine`."""

    n_ctx: int | None
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    kv_unified: bool
    type_k: str | None
    type_v: str | None
    flash_attn: bool
    offload_kqv: bool
    threads: int
    threads_batch: int
    n_gpu_layers: int
    split_mode: str
    main_gpu: int
    tensor_split: Sequence[float]
    check_tensors: bool
    max_context: int | None

    def __post_init__(self) -> None:
        counts = ["n_batch", "n_ubatch", "n_seq_max", "threads", "threads_batch"]
        counts += [name for name in ("n_ctx", "max_context") if getattr(self, name) is not None]
        for name in counts:
            value = checked_integer(name, getattr(self, name), 1)
            if value > _LARGEST.get(name, value):
                raise ValueError(f"{name}={value}; llama.cpp has at most {_LARGEST[name]}")
        for name in ("n_gpu_layers", "main_gpu"):
            checked_integer(name, getattr(self, name), -1)
        shares: object = self.tensor_split
        if not isinstance(shares, Sequence) or not all(
            isinstance(s, (int, float)) for s in shares
        ):
            raise TypeError(f"tensor_split={shares!r}; expected a list of numbers, one per GPU")
        for name in ("type_k", "type_v"):
            value = getattr(self, name)
            if value is not None and value not in CACHE_TYPES:
                raise ValueError(f"{name}={value!r}; expected one of {', '.join(CACHE_TYPES)}")
        if self.split_mode not in _SPLIT_MODES:
            raise ValueError(f"split_mode={self.split_mode!r}; expected none, layer or row")


class LlamaContext:
    """Runs batches of tokens of a model, and copies and cuts sequences in its memory.

    Args:
        file: A GGUF file, or the first file of a split model.
        options: Parameters, which are compared with those of the created context.

    Attributes:
        parts: Number of parts into which `divide` has divided the cells, 0 for none.
        all_cells: Number of cells of the shared cache, which `divide` divides.
        can_cut: Whether the end of a sequence can be removed.
        max_context: Maximum length of a sequence.
        n_batch: Maximum number of tokens in one call of `decode`.
        n_cells: Number of cells of the cache; in a divided cache, those of all parts.
        n_logits: Width of a row of logits.

    Raises:
        ModelLoadError: llama.cpp cannot load the file, or the model does not predict the next
            token.
    """

    def __init__(self, file: Path, options: ContextOptions) -> None:
        self._llama, self._file, self._options = llama(), file, options
        self.parts = 0
        self._active: int | None = None
        self._context: Any = None
        self._model = self._load_model(options)
        try:
            self._check_model()
            self._open(options)
        except BaseException:
            self.close()
            raise
        self.all_cells = self.n_cells

    # -- memory -----------------------------------------------------------------------

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a sequence to an empty one."""
        if self.shares_tokens:
            self._llama.llama_memory_seq_cp(self._memory, source, target, 0, length)
            return
        self._llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if self.can_cut:  # other caches copy whole sequences only
            self._llama.llama_memory_seq_rm(self._memory, target, length, -1)

    def can_continue(self, length: int, held: int) -> bool:
        """Whether a sequence of `held` tokens can be continued after the first `length`."""
        if not self.can_cut and length != held:
            return False
        # llama.cpp reuses the cells of tokens outside the window of the last one.
        return not self._window or length == held or held < self._window

    def cut(self, sequence: int, length: int) -> bool:
        """Remove the tokens after the first `length`; False if impossible, without a change."""
        if length and not self.can_continue(length, self.held(sequence)):
            return False
        first = length or -1
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, first, -1))

    def held(self, sequence: int) -> int:
        """Return the number of a sequence's tokens in llama.cpp's memory."""
        return int(self._llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    # -- division ---------------------------------------------------------------------

    @property
    def can_divide(self) -> bool:
        """Whether `divide` can help: a cache of keys and values, without windows."""
        return self.can_cut and not self._window

    @property
    def shares_tokens(self) -> bool:
        """Whether a token may belong to several sequences."""
        return self._options.kv_unified and not self.parts and self.can_cut

    @property
    def n_seq_max(self) -> int:
        """Number of sequences of the context."""
        return self.parts or self._options.n_seq_max

    @property
    def separates_sequences(self) -> bool:
        """Whether a call must not compute tokens of several sequences, see `_create`.

        llama.cpp divides such a batch into several passes unless sequences share tokens.
        """
        return bool(self._window) and not self.shares_tokens

    @property
    def is_open(self) -> bool:
        """Whether the context exists; False if `divide` ran out of memory."""
        return bool(self._context)

    def divide(self, parts: int) -> None:
        """Create the context again, empty, with a part of the cells for each sequence.

        Without parts, or if llama.cpp cannot create them, the sequences share all cells.

        Raises:
            EvaluationError: There is no memory for a shared cache either.
        """
        options = replace(self._options, n_ctx=self.all_cells)
        if parts:
            n_ctx = parts * cells_of_part(self.all_cells, parts)
            options = replace(options, n_ctx=n_ctx, n_seq_max=parts, kv_unified=False)
        self._free_context()  # before creation: both may not fit into memory
        self.parts = parts
        try:
            self._open(options)
        except ModelLoadError as error:
            self._free_context()
            if not parts:
                raise EvaluationError(str(error)) from error
            self.divide(0)

    def _free_context(self) -> None:
        if self._context:
            self._llama.llama_free(self._context)
        self._context = self._active = None

    # -- computation ------------------------------------------------------------------

    def decode(self, batch: TokenBatch, part: Part) -> NDArray[np.float32]:
        """Compute a part of a batch.

        Returns:
            The logits of its outputs, shape `(outputs, n_logits)`, in memory of llama.cpp that
            is valid until the next call.

        Raises:
            CacheFullError: The cache has no room for it; its content is unchanged.
            EvaluationError: The call failed; the cache of its sequences is undefined.
        """
        first = part.first
        code = self._llama.llama_decode(
            self._context,
            Batch(
                n_tokens=part.end - first,
                token=_address(batch.tokens, first),
                embd=None,
                pos=_address(batch.positions, first),
                n_seq_id=_address(batch.counts, first),
                seq_id=_address(batch.addresses, first),
                logits=_address(batch.outputs, first),
            ),
        )
        if code == _NO_ROOM:
            raise CacheFullError
        if code:
            raise EvaluationError(f"llama_decode returned {code}: {recent_messages()}")
        if not len(part.outputs):
            return np.empty((0, self.n_logits), np.float32)
        address = self._llama.llama_get_logits(self._context)
        if not address:
            raise EvaluationError(f"llama.cpp returned no logits: {recent_messages()}")
        # `np.ctypeslib.as_array` of a pointer would store a type for each number of outputs.
        logits = (ctypes.c_float * (len(part.outputs) * self.n_logits)).from_address(address)
        return np.frombuffer(memoryview(logits), np.float32).reshape(-1, self.n_logits)

    # -- adapters ---------------------------------------------------------------------

    def load_adapter(self, name: str, file: Path) -> int:
        """Load a LoRA adapter in GGUF; return llama.cpp's pointer to it.

        Raises:
            AdapterError: The file does not fit the model, or is not plain LoRA.
        """
        recent_messages()
        adapter = self._llama.llama_adapter_lora_init(self._model, bytes(file))
        if not adapter:
            raise AdapterError(
                f"llama.cpp could not load adapter {name!r} from {str(file)!r}: "
                f"{recent_messages()}"
            )
        if self._llama.llama_adapter_get_alora_n_invocation_tokens(adapter):
            self._llama.llama_adapter_lora_free(adapter)
            raise AdapterError(
                f"adapter {name!r} in {str(file)!r} is active only after invocation tokens "
                f"(aLoRA), which genlm-llamacpp does not support"
            )
        return int(adapter)

    def free_adapter(self, adapter: int) -> None:
        """Free an adapter."""
        self.activate(None)
        self._llama.llama_adapter_lora_free(adapter)

    def activate(self, adapter: int | None) -> None:
        """Activate an adapter for the next calls of `decode`; None deactivates it."""
        if adapter == self._active:
            return
        count = 0 if adapter is None else 1
        adapters = (ctypes.c_void_p * 1)(adapter)
        scales = (ctypes.c_float * 1)(1.0)
        code = self._llama.llama_set_adapters_lora(self._context, adapters, count, scales)
        if code:
            raise EvaluationError(f"llama_set_adapters_lora returned {code}")
        self._active = adapter

    def close(self) -> None:
        """Free the context and the weights, adapters included."""
        self._free_context()
        self._llama.llama_model_free(self._model)
        self._model = None

    # -- facts ------------------------------------------------------------------------

    def description(self) -> str:
        """Return llama.cpp's description of the model, such as `llama 8B Q4_K - Medium`."""
        text = ctypes.create_string_buffer(128)
        self._llama.llama_model_desc(self._model, text, len(text))
        return text.value.decode(errors="replace")

    # -- creation ---------------------------------------------------------------------

    def _load_model(self, options: ContextOptions) -> Any:
        params = self._llama.llama_model_default_params()
        params.n_gpu_layers = options.n_gpu_layers
        params.split_mode = _SPLIT_MODES[options.split_mode]
        params.main_gpu = options.main_gpu
        params.check_tensors = options.check_tensors
        if options.tensor_split:
            max_devices = self._llama.llama_max_devices()
            if len(options.tensor_split) > max_devices:
                raise ValueError(
                    f"tensor_split has {len(options.tensor_split)} shares; llama.cpp takes "
                    f"{max_devices}"
                )
            shares = (ctypes.c_float * max_devices)(*options.tensor_split)
            params.tensor_split = shares
        recent_messages()
        model = self._llama.llama_model_load_from_file(bytes(self._file), params)
        if not model:
            raise ModelLoadError(
                f"llama.cpp could not load {str(self._file)!r}: {recent_messages()}"
            )
        return model

    def _check_model(self) -> None:
        unsupported = None
        if self._llama.llama_model_has_encoder(self._model):
            unsupported = "a model with an encoder"
        elif self._llama.llama_model_is_diffusion(self._model):
            unsupported = "a diffusion model"
        if unsupported is not None:
            raise ModelLoadError(
                f"{str(self._file)!r} is {unsupported}; genlm serves models that predict the "
                f"next token"
            )
        is_recurrent = self._llama.llama_model_is_recurrent(self._model)
        self.can_cut = not (is_recurrent or self._llama.llama_model_is_hybrid(self._model))
        self._window = max(0, int(self._llama.llama_model_n_swa(self._model)))
        vocab = self._llama.llama_model_get_vocab(self._model)
        self.n_logits = int(self._llama.llama_vocab_n_tokens(vocab))

    def _open(self, options: ContextOptions) -> None:
        """Create a context and compare it with its options."""
        self._context = self._create(options)
        self._check_context(options)
        self._memory = self._llama.llama_get_memory(self._context)

    def _create(self, options: ContextOptions) -> Any:
        params = self._llama.llama_context_default_params()
        default = "f32" if metadata(self._model, "general.file_type") == "0" else "f16"
        type_k, type_v = options.type_k or default, options.type_v or default
        if type_k.startswith("q") and self._head_width() % _QUANTISED_BLOCK:
            # llama.cpp reads wrong keys or aborts; with flash attention, it checks this itself.
            raise ModelLoadError(
                f"type_k={type_k!r} stores keys in blocks of {_QUANTISED_BLOCK} values, which "
                f"do not divide the model's {self._head_width()} values per head; use "
                f"type_k='f16'"
            )
        params.type_k, params.type_v = CACHE_TYPES[type_k][0], CACHE_TYPES[type_v][0]
        params.n_ctx = options.n_ctx or self._default_cells(type_k, type_v, options)
        # llama.cpp assigns cells to all passes of a call before the first one. A later pass may
        # reuse cells outside its windows, and loses tokens that an earlier pass needs.
        passes = options.n_ubatch if self._window else options.n_batch
        params.n_batch = self.n_batch = min(options.n_batch, passes, params.n_ctx)
        params.n_ubatch = min(options.n_ubatch, self.n_batch)
        params.n_seq_max = options.n_seq_max
        params.n_outputs_max = max(self.n_batch, options.n_seq_max)  # asserted in C
        params.n_threads = options.threads
        params.n_threads_batch = options.threads_batch
        params.flash_attn_type = int(options.flash_attn)
        params.offload_kqv = options.offload_kqv
        params.kv_unified = options.kv_unified
        params.swa_full = True  # layers with windows have as many cells as other layers
        recent_messages()
        context = self._llama.llama_init_from_model(self._model, params)
        if not context:
            raise ModelLoadError(
                f"llama.cpp could not create a context of {params.n_ctx} cells for "
                f"{params.n_seq_max} sequences: {recent_messages()}"
            )
        return context

    def _check_context(self, options: ContextOptions) -> None:
        """Compare the context with its parameters, because ctypes does not check structs."""
        library, context = self._llama, self._context
        self.n_cells = int(library.llama_n_ctx(context))
        longest = int(library.llama_n_ctx_seq(context))
        trained = int(library.llama_model_n_ctx_train(self._model))
        limits = (longest, trained, options.max_context or longest)
        self.max_context = min(limit for limit in limits if limit > 0)
        parts = 1 if options.kv_unified else options.n_seq_max
        compared = {
            "n_ctx for each sequence": (longest * parts, self.n_cells),
            "n_batch": (int(library.llama_n_batch(context)), self.n_batch),
            "n_seq_max": (int(library.llama_n_seq_max(context)), options.n_seq_max),
            "threads": (int(library.llama_n_threads(context)), options.threads),
        }
        for name, (actual, requested) in compared.items():
            if actual != requested:
                raise ModelLoadError(
                    f"requested {name}={requested} of llama.cpp for {str(self._file)!r}; the "
                    f"context has {actual}"
                )
        if not library.llama_get_memory(context):
            raise ModelLoadError(
                f"llama.cpp creates no cache for {str(self._file)!r}, which is an embedding "
                f"model; genlm serves models that predict the next token"
            )

    def _default_cells(self, type_k: str, type_v: str, options: ContextOptions) -> int:
        cells = _DEFAULT_CELLS
        if not options.kv_unified:
            cells = max(cells, options.n_seq_max * _CELLS_ROUNDED_TO)
        values = (
            int(self._llama.llama_model_n_layer(self._model))
            * max(1, int(self._llama.llama_model_n_head_kv(self._model)))
            * self._head_width()
        )
        nbytes = int(values * (CACHE_TYPES[type_k][1] + CACHE_TYPES[type_v][1])) or 1
        budget = cache_budget_bytes(
            share=_SHARE,
            at_least=nbytes * _CELLS_ROUNDED_TO,
            at_most=nbytes * cells,
            option="n_ctx",
        )
        return max(_CELLS_ROUNDED_TO, budget // nbytes // _CELLS_ROUNDED_TO * _CELLS_ROUNDED_TO)

    def _head_width(self) -> int:
        """Return the number of values of a key in one head."""
        architecture = metadata(self._model, "general.architecture")
        heads = max(1, int(self._llama.llama_model_n_head(self._model)))
        width = metadata(self._model, f"{architecture}.attention.key_length")
        return int(width or int(self._llama.llama_model_n_embd(self._model)) // heads)


def cells_of_part(cells: int, parts: int) -> int:
    """Return the number of cells of each part of a divided cache."""
    return cells // parts // _CELLS_ROUNDED_TO * _CELLS_ROUNDED_TO


def _address(array: NDArray[Any], first: int) -> int:
    return int(array.ctypes.data) + first * array.itemsize
