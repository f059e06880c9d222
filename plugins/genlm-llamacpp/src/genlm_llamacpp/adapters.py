"""LoRA adapters in GGUF."""

from __future__ import annotations

from pathlib import Path

from genlm.plugin import AdapterTable
from genlm_llamacpp.context import LlamaContext
from genlm_llamacpp.files import adapter_file, adapter_settings


class Adapters(AdapterTable[int]):
    """The loaded adapters and llama.cpp's pointers to them.

    Args:
        context: The context that loads, activates and frees adapters.
    """

    def __init__(self, context: LlamaContext) -> None:
        super().__init__()
        self._context = context

    def activate(self, name: str | None) -> None:
        """Activate a loaded adapter, or the base model alone for None."""
        self._context.activate(None if name is None else self.loaded[name])

    def _load(self, name: str, path: Path) -> int:
        file = adapter_file(name, path)
        if (file.parent / "adapter_model.safetensors").is_file():  # the converted adapter
            adapter_settings(name, file.parent)
        return self._context.load_adapter(name, file)

    def _unload(self, name: str, adapter: int) -> None:  # noqa: ARG002
        self._context.free_adapter(adapter)
