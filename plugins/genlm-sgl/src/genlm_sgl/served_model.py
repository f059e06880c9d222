"""SGLang's model in this process: forward passes, hidden states, LoRA adapters.

`model_runner` builds the model; this module has all other calls into SGLang that compute.
SGLang's scheduler, radix cache and allocator are not used: a pass receives the slots of the KV
cache that its tokens read and write, in rows of SGLang's table of slots (`req_to_token_pool`).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from genlm.plugin import EvaluationError, ModelLoadError, device_index
from genlm.prefix import Segments, Slots, TokenBatch
from genlm_sgl.model_runner import (
    LoadWeightsHook,
    RunnerConfig,
    build_runner,
    destroy_process_groups,
)

Integers = npt.NDArray[np.int64]


class ServedModel:
    """A model that SGLang has loaded, or one rank of it, and its KV cache.

    Args:
        config: The published settings.
        on_load_weights: Called when the model is built, before its weights are loaded.

    Attributes:
        ranks: Number of tensor-parallel ranks, which compute every pass at the same time.
        output_bias: Bias that is added to the logits of each pass; None for no bias.

    Raises:
        ModelLoadError: The model's state is not one slot of the KV cache per token.
        Exception: Any error of SGLang, after its process groups are destroyed.
    """

    def __init__(self, config: RunnerConfig, on_load_weights: LoadWeightsHook) -> None:
        arguments = config.arguments
        self._memory_mode: Callable[[], contextlib.AbstractContextManager[object]]
        self._memory_mode = contextlib.nullcontext
        if arguments.enable_lora and arguments.device == "cpu":
            from genlm_sgl.cpu.stubs import Unpinned

            self._memory_mode = Unpinned
        self.ranks = int(arguments.tp_size)
        self.output_bias: torch.Tensor | None = None
        self._logit_places: Integers | None = None  # of the running pass
        self._logits: list[torch.Tensor] = []
        self._trunk: Slots | None = None
        self._trunk_rows = 0
        try:
            with self._memory_mode():
                self._runner = build_runner(config, on_load_weights)
            self._check_slots()
        except BaseException:
            destroy_process_groups()
            raise
        self._table: torch.Tensor = self._runner.req_to_token_pool.req_to_token
        self._device = torch.device(self._runner.device)

    def _check_slots(self) -> None:
        """Refuse models and options with which a token is not one slot of the KV cache.

        Raises:
            ModelLoadError: The message has the reason.
        """
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        runner = self._runner
        if runner.page_size > 1:
            backends = " and ".join(sorted(self.attention_backends))
            raise ModelLoadError(
                f"SGLang's attention backend {backends} has pages of {runner.page_size} "
                f"tokens, and genlm-sgl needs pages of one token; choose another backend, for "
                f"example engine_opts={{'attention_backend': 'triton'}}"
            )
        if not runner.req_to_token_pool.size:
            raise ModelLoadError(
                "SGLang cannot compute a single sequence with these options; raise "
                "engine_opts['max_total_tokens'] or engine_opts['max_running_requests']"
            )
        reasons = {
            "an encoder": runner.model_config.is_encoder_decoder,
            "n-gram embeddings": runner.ngram_embedding_manager.enabled,
            "recurrent layers": type(runner.req_to_token_pool) is not ReqToTokenPool,
            "a KV cache with several kinds of slots": (
                type(runner.token_to_kv_pool_allocator) is not TokenToKVPoolAllocator
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise ModelLoadError(
                    f"SGLang serves {type(self.model).__name__} with {reason}, so its state is "
                    f"not one slot of the KV cache for each token; use genlm-hf for this model"
                )

    # -- the built model --------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a context in the model and the KV cache."""
        return min(int(self._runner.model_config.context_len), self.token_capacity)

    @property
    def embedding_rows(self) -> int:
        """Number of token ids with an embedding."""
        return int(self._runner.model_config.vocab_size)

    @property
    def model(self) -> Any:
        """The model as a torch module."""
        return self._runner.model

    @property
    def text_config(self) -> Any:
        """The config of the text model with SGLang's changes."""
        return self._runner.model_config.hf_text_config

    @property
    def is_fallback(self) -> bool:
        """Whether SGLang has no class for the model and runs transformers' model."""
        return type(self.model).__module__ == "sglang.srt.models.transformers"

    @property
    def attention_backends(self) -> frozenset[str]:
        """SGLang's names of the attention backends for prefill and decode."""
        runner = self._runner
        return frozenset(
            {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        dtype: torch.dtype = self._runner.model_config.dtype
        return dtype

    @property
    def device(self) -> str:
        """Name of the device of the logits."""
        return str(self._runner.device)

    @property
    def token_capacity(self) -> int:
        """Size of the KV cache in tokens; the slots are numbered from 1."""
        return int(self._runner.max_total_num_tokens)

    @property
    def bytes_per_token(self) -> int:
        """Size of the keys and values of one token."""
        size = int(self._runner.token_to_kv_pool.mem_usage * 2**30)
        return max(1, size // (self.token_capacity + 1))

    @property
    def max_rows(self) -> int:
        """Maximum number of sequences in a pass."""
        return int(self._runner.req_to_token_pool.size)

    @property
    def max_tokens(self) -> int:
        """Maximum number of new tokens in a pass."""
        from sglang.srt.runtime_context import get_schedule

        settings = get_schedule()
        chunk = settings.chunked_prefill_size or 0
        return int(chunk if chunk > 0 else settings.max_prefill_tokens)

    # -- passes -----------------------------------------------------------------------

    def write_rows(self, trunk: Slots, slots: npt.NDArray[np.int32]) -> None:
        """Write the slots of sequences to the table of slots for the next passes.

        Args:
            trunk: Common first slots of the sequences. They are not written again if the same
                object was written before.
            slots: The slots after the trunk, shape `(d, longest)`; entries after the end of a
                sequence are ignored.
        """
        count = len(slots)
        if trunk is not self._trunk or count > self._trunk_rows:
            self.write_slots(trunk[None].astype(np.int32), count, begin=0)
            self._trunk, self._trunk_rows = trunk, count
        self.write_slots(slots, count, begin=len(trunk))

    def write_slots(self, slots: npt.NDArray[np.int32], count: int, begin: int) -> None:
        """Write slots to the first `count` rows of the table, from position `begin` on.

        Args:
            slots: Shape `(count, n)`, or `(1, n)` for the same slots in each row.
            count: Number of rows.
            begin: Position of the first slot.
        """
        with torch.inference_mode():
            end = begin + slots.shape[1]
            self._table[1 : count + 1, begin:end] = self._to_device(slots)

    def decode(
        self,
        tokens: Integers,
        positions: Integers,
        writes: Slots,
        rows: Integers,
        adapter_id: str | None,
    ) -> torch.Tensor:
        """Compute tokens, each of which attends to the slots of a row up to its position.

        Each layer stores the keys and values of all tokens before any token attends. Therefore
        a token may follow another token of the pass.

        Args:
            tokens: Token ids, shape `(n,)`, at most `max_rows`.
            positions: Positions of the tokens in their sequences.
            writes: Slots of their keys and values.
            rows: Indices of their rows, which `write_rows` wrote.
            adapter_id: SGLang's id of the adapter; None for the model without adapters.

        Returns:
            Logits after each token, shape `(n, width)`.
        """
        return self.run_pass(
            "DECODE", tokens, positions + 1, writes, rows, adapter_id=adapter_id
        )

    def extend(
        self,
        batch: TokenBatch,
        segments: Segments,
        adapter_id: str | None,
        places: Integers | None = None,
    ) -> torch.Tensor:
        """Compute segments of a batch whose earlier tokens are computed.

        Args:
            batch: The batch.
            segments: At most `max_rows` segments; `write_rows` wrote their slots to the first
                rows of the table, in this order.
            adapter_id: SGLang's id of the adapter; None for the model without adapters.
            places: Indices into the tokens of all segments, which requires
                `read_hidden_states`; None for the last token of each segment.

        Returns:
            Logits after these tokens, shape `(n, width)`.
        """
        pasts, counts, tokens = (
            batch.positions[segments.firsts],
            segments.counts,
            segments.tokens,
        )
        return self.run_pass(
            "EXTEND",
            batch.tokens[tokens],
            pasts + counts,
            batch.writes[tokens],
            np.arange(len(counts)),
            adapter_id=adapter_id,
            places=places,
            prefix_lens=pasts.tolist(),
            extend_lens=counts.tolist(),
            extend_num_tokens=len(tokens),
        )

    def run_pass(
        self,
        mode: str,
        tokens: Integers,
        lengths: Integers,
        writes: Slots,
        rows: Integers,
        *,
        adapter_id: str | None,
        places: Integers | None = None,
        **extend: Any,
    ) -> torch.Tensor:
        """Run SGLang's model.

        Args:
            mode: `"DECODE"` or `"EXTEND"`.
            tokens: New tokens.
            lengths: Length of each sequence with its new tokens.
            writes: Slots of the keys and values of new tokens.
            rows: Row of each sequence.
            adapter_id: As in `decode`.
            places: As in `extend`.
            **extend: Arguments of SGLang's `ScheduleBatch` in an extend.

        Returns:
            Logits, shape `(n, width)`.
        """
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner, count = self._runner, len(rows)
        # The attributes of a request of SGLang's scheduler that a pass reads.
        request = SimpleNamespace(
            rid="",
            lora_id=adapter_id,
            token_type_ids=None,
            extend_end=0,
            full_untruncated_fill_ids=(),
        )
        with torch.inference_mode(), self._memory_mode(), self._requesting(places):
            lengths_cpu = torch.from_numpy(lengths)
            lengths_on_device = self._to_device(lengths)
            rows_cpu = torch.from_numpy(rows + 1)  # SGLang pads passes with row 0
            batch = ScheduleBatch(
                reqs=[request] * count,
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                model_config=runner.model_config,
                device=runner.device,
                spec_algorithm=SpeculativeAlgorithm.NONE,
                forward_mode=ForwardMode[mode],
                input_ids=self._to_device(tokens),
                req_pool_indices=self._to_device(rows + 1),
                req_pool_indices_cpu=rows_cpu,
                seq_lens=lengths_on_device,
                seq_lens_cpu=lengths_cpu,
                orig_seq_lens=lengths_on_device.int(),
                out_cache_loc=self._to_device(writes),
                multimodal_inputs=[None] * count,
                **extend,
            )
            forward_batch = ForwardBatch.init_new(
                batch, runner, return_hidden_states_before_norm=False
            )
            output = runner.forward(forward_batch)
            if places is not None:  # the hook of `read_hidden_states` computed the logits
                return self._logits.pop()
            logits = self._add_output_bias(output.logits_output.next_token_logits)
            if self._device.type != "cpu":  # logits may be the output buffer of a graph
                logits = logits.clone()
        return logits

    @contextlib.contextmanager
    def _requesting(self, places: Integers | None) -> Iterator[None]:
        """Make the hook of `read_hidden_states` compute the logits of `places`."""
        self._logit_places = places
        try:
            yield
        finally:
            self._logit_places = None
            self._logits.clear()

    def _add_output_bias(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.output_bias is None else logits + self.output_bias

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(self._device, non_blocking=True)

    # -- hidden states ----------------------------------------------------------------

    @property
    def why_not_scored(self) -> str | None:
        """Reason why scores cannot be computed from hidden states, None if they can."""
        runner = self._runner
        if getattr(runner.lora_manager, "lm_head_module", None) is not None:
            return "adapters of lm_head"  # applied only to one row of each request
        graphs = runner.prefill_cuda_graph_runner
        if type(graphs).__name__ in {"NoneType", "EagerRunner"}:
            return None
        # Some graphs, such as SGLang's default on CUDA, end before the logits.
        if getattr(graphs, "_uses_eager_prefill_tail", lambda: False)():
            return None
        return "graphs of prefills"  # do not call Python

    def read_hidden_states(self) -> None:
        """Make `extend` compute logits from any of the hidden states of a pass.

        Raises:
            AttributeError: The model computes logits differently from the tested version.
        """
        from sglang.srt.layers.logits_processor import LogitsMetadata

        processor = self.model.logits_processor
        signature = inspect.signature(processor.forward)
        get_logits = processor._get_logits  # noqa: SLF001

        def compute_logits(
            _processor: Any, arguments: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            if self._logit_places is None:
                return
            values = signature.bind(*arguments, **named).arguments
            forward_batch, lm_head = values["logits_metadata"], values["lm_head"]

            states, count = values["hidden_states"], forward_batch.extend_num_tokens
            if len(states) < count:  # the graph of a pass may compute more states
                raise EvaluationError(
                    f"SGLang computed {len(states)} hidden states in a pass over {count} tokens"
                )
            logits = get_logits(
                states[device_index(self._logit_places.tolist(), states.device)],
                lm_head,
                LogitsMetadata.from_forward_batch(forward_batch),
                use_logits_buffer=False,
            )
            self._logits.append(self._add_output_bias(logits))

        processor.register_forward_pre_hook(compute_logits, with_kwargs=True)

    # -- weights ----------------------------------------------------------------------

    def vectors(self) -> list[tuple[str, torch.Tensor]]:
        """Return copies of the biases and other vectors of the model by name, on the CPU."""
        tensors = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        return [
            (name, tensor.detach().float().cpu())
            for name, tensor in tensors
            if tensor.ndim <= 1 or "bias" in name
        ]

    def require_loadable(self) -> None:
        """Raise `ValueError` for a quantised model, whose weights cannot be replaced."""
        if self._runner.model_config.quantization is not None:
            raise ValueError("the weights of a quantised model cannot be replaced")

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the weights of the model.

        SGLang ignores tensors whose names it does not know. Therefore, an entry of each row of
        the parameters is NaN until the row is loaded.

        Args:
            weights: All tensors of the checkpoint by name.

        Raises:
            EvaluationError: Parameters received no weights, or NaN.
            Exception: Any error of SGLang. The model cannot be used after an error.
        """
        with torch.inference_mode():
            marks = {
                name: parameter.data[..., :1] if parameter.ndim else parameter.data
                for name, parameter in self.model.named_parameters()
                if parameter.is_floating_point()
            }
            for mark in marks.values():
                mark.fill_(math.nan)
            # SGLang's Gemma adds 1 to the given weights of norms.
            tensors = [(name, t.clone() if t.ndim == 1 else t) for name, t in weights]
            updater = self._runner.weight_updater
            is_loaded, message = updater.update_weights_from_tensor(tensors)
            absent = [name for name, mark in marks.items() if mark.isnan().any()]
        if not is_loaded:
            raise EvaluationError(f"SGLang did not load the weights: {message}")
        if absent:
            raise EvaluationError(
                f"{len(absent)} parameters of SGLang's model received no weights, or NaN, such "
                f"as {absent[0]!r}; pass all tensors of the checkpoint by name"
            )

    # -- adapters ---------------------------------------------------------------------

    def load_adapter(self, adapter_id: str, name: str, folder: str) -> str | None:
        """Load a LoRA adapter.

        The weights are moved into the model's buffers immediately, because only then does
        SGLang compare their shapes.

        Args:
            adapter_id: New id of the adapter for passes.
            name: SGLang's name of the adapter.
            folder: The adapter's folder.

        Returns:
            None, or the reason why SGLang does not load the adapter.
        """
        from sglang.srt.lora.lora_registry import LoRARef

        runner = self._runner
        adapter = LoRARef(lora_id=adapter_id, lora_name=name, lora_path=folder, pinned=False)
        with torch.inference_mode(), self._memory_mode():
            loaded = runner.load_lora_adapter(adapter)
            if not loaded.success:
                return str(loaded.error_message)
            try:
                runner.lora_manager.fetch_new_loras({adapter_id})
            except Exception as error:  # noqa: BLE001 - including assertions
                runner.unload_lora_adapter(adapter)
                return str(error)
        return None

    def unload_adapter(self, adapter_id: str, name: str) -> str | None:
        """Unload a LoRA adapter; return the reason of a failure."""
        from sglang.srt.lora.lora_registry import LoRARef

        with torch.inference_mode(), self._memory_mode():
            adapter = LoRARef(lora_id=adapter_id, lora_name=name)
            result = self._runner.unload_lora_adapter(adapter)
        return None if result.success else str(result.error_message)

    def close(self) -> None:
        """Free the model and SGLang's process groups."""
        del self._runner, self._table
        destroy_process_groups()
