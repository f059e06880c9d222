"""Tensor parallelism: `ParallelModel`, whose further ranks are child processes.

Rank 0 is in the calling process and determines every pass. Each other rank is a child process
with a part of the weights and of the KV cache, and runs the same passes::

    rank 0, the engine's thread                 rank 1, 2, ...: run_rank
    ParallelModel                               ServedModel
      write_slots  ----- slots ------------->     write_slots
      run_pass     ----- tokens, slots ----->     run_pass
          |       <---- SGLang's collectives -->     |
       logits      <---- finished, or error --     logits, which are dropped
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from genlm_sgl.corrections import ModelCorrections
from genlm_sgl.loading import read_text_config
from genlm_sgl.model_runner import LoadWeightsHook, RunnerConfig, configure, server_options
from genlm_sgl.process_state import QuietLogger, quiet
from genlm_sgl.rank_processes import Messages, RankProcesses, serve_rank
from genlm_sgl.served_model import ServedModel


class ParallelModel(ServedModel):
    """Rank 0 of a model whose other ranks run in child processes.

    Args:
        config: The published settings.
        on_load_weights: Called when the model is built, before its weights are loaded.
        options: The arguments of `ServerArgs` of which they are made.
        gpu_id: Index of the GPU of rank 0.

    Raises:
        ModelLoadError: See `ServedModel`.
        EvaluationError: Another rank raised an error.
        EngineDiedError: A process has ended.
    """

    def __init__(
        self,
        config: RunnerConfig,
        on_load_weights: LoadWeightsHook,
        options: Mapping[str, Any],
        gpu_id: int,
    ) -> None:
        cpu = config.arguments.device == "cpu"
        self._ranks = RankProcesses(config.arguments.tp_size, run_rank)
        try:
            self._ranks.run("import_sglang", torch.get_num_threads(), cpu=cpu)
            # The ranks wait for each other without end when they create process groups, so
            # errors before are found in a call of their own.
            self._ranks.run("configure", {**options, "nccl_port": config.port}, gpu_id)
            with self._ranks.call("build"):
                super().__init__(config, on_load_weights)
        except BaseException:
            self._ranks.close()
            raise

    def write_slots(self, slots: Any, count: int, begin: int) -> None:
        """Write slots to the tables of all ranks."""
        self._ranks.post("write_slots", slots, count, begin)
        super().write_slots(slots, count, begin)

    def run_pass(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """Run a pass on all ranks and return the logits."""
        with self._ranks.call("run_pass", *arguments, **named):
            return super().run_pass(*arguments, **named)

    def read_hidden_states(self) -> None:
        """Make all ranks compute logits from any of the hidden states of a pass."""
        with self._ranks.call("read_hidden_states"):
            super().read_hidden_states()

    def vectors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the vectors of all ranks."""
        with self._ranks.call("vectors") as others:
            own = super().vectors()
        return [
            (
                name,
                torch.cat([tensor.flatten(), *(other[place][1].flatten() for other in others)]),
            )
            for place, (name, tensor) in enumerate(own)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the weights of all ranks."""
        tensors = list(weights)
        with self._ranks.call("load_weights"):
            for name, tensor in tensors:
                self._ranks.send((name, tensor.detach().cpu()))
            self._ranks.send(None)
            super().load_weights(tensors)

    def load_adapter(self, adapter_id: str, name: str, folder: str) -> str | None:
        """Load a LoRA adapter into all ranks; return the reason of a failure."""
        with self._ranks.call("load_adapter", adapter_id, name, folder) as reasons:
            reason = super().load_adapter(adapter_id, name, folder)
        return next(filter(None, [reason, *reasons]), None)

    def unload_adapter(self, adapter_id: str, name: str) -> str | None:
        """Unload a LoRA adapter from all ranks; return the reason of a failure."""
        with self._ranks.call("unload_adapter", adapter_id, name) as reasons:
            reason = super().unload_adapter(adapter_id, name)
        return next(filter(None, [reason, *reasons]), None)

    def close(self) -> None:
        """Free the model and end the processes of the other ranks."""
        try:
            super().close()
        finally:
            self._ranks.close()


class _Rank:
    """A rank in its process: the methods that rank 0 calls, besides those of the model.

    Args:
        rank: The rank.
        messages: Messages of rank 0.
    """

    def __init__(self, rank: int, messages: Messages) -> None:
        self._rank, self._messages = rank, messages
        self._imports = contextlib.ExitStack()  # open until the process ends
        self._config: RunnerConfig
        self._corrections: ModelCorrections
        self._served: ServedModel

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, once it is built."""
        return getattr(vars(self)["_served"], name)

    def import_sglang(self, threads: int, *, cpu: bool) -> None:
        """Import SGLang, with stubs on a CPU."""
        torch.set_num_threads(threads)
        QuietLogger("sglang")
        self._imports.enter_context(quiet())
        if cpu:
            from genlm_sgl.cpu.stubs import stub_packages

            self._imports.enter_context(stub_packages())
        server_options()

    def configure(self, options: Mapping[str, Any], gpu_id: int) -> None:
        """Publish SGLang's settings and read the config of the model."""
        self._config = configure(options, self._rank, gpu_id)
        config = read_text_config(options["model_path"], options)
        self._corrections = ModelCorrections(config, options)

    def build(self) -> None:
        """Build the model at the same time as all other ranks."""
        self._served = ServedModel(self._config, self._corrections.on_load_weights)

    def run_pass(self, *arguments: Any, **named: Any) -> None:
        """Run a pass and drop the logits, which rank 0 has as well."""
        self._served.run_pass(*arguments, **named)

    def load_weights(self) -> None:
        """Replace the weights by those that rank 0 sends, up to None."""
        self._served.load_weights(list(iter(self._messages.get, None)))


def run_rank(descriptor: int, rank: int) -> NoReturn:
    """Serve a rank in this process; see `serve_rank`."""
    serve_rank(descriptor, functools.partial(_Rank, rank))
