"""Published class `ParallelTokenCharacterTrie`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

import genlm
from genlm.backend.trie.base import TokenCharacterTrie

__all__ = ["ParallelTokenCharacterTrie"]


def _device_trie() -> Any:
    """Return the trie of genlm-trie-cuda, or the core's CPU trie if it is not installed."""
    try:
        return genlm.get_trie("cuda")
    except genlm.PluginError:
        return genlm.TokenCharacterTrie


_DeviceTrie = _device_trie()


class ParallelTokenCharacterTrie(TokenCharacterTrie, _DeviceTrie):  # type: ignore[misc, valid-type]
    """Maps to the trie `"cuda"` of genlm-trie-cuda, or to the core's if it is not installed.

    Results of the reductions are float32, as published.

    Args:
        decode: As for `TokenCharacterTrie`.
        device: `"cuda"` or `"cpu"`; None reduces weights on their device.
        **options: Further options of the trie.

    Raises:
        MissingRequirementError: The device is `"cuda"` and genlm-trie-cuda is not installed.
        ValueError: The device is unknown.
    """

    _dtype = np.float32

    def __init__(
        self, decode: Any, device: Literal["cpu", "cuda"] | None = None, **options: Any
    ) -> None:
        if device not in {None, "cpu", "cuda"}:
            raise ValueError(f"device={device!r}: expected 'cpu', 'cuda' or None")
        self._device_name = device
        if _DeviceTrie is genlm.TokenCharacterTrie:
            if device == "cuda":
                raise genlm.MissingRequirementError(
                    "ParallelTokenCharacterTrie(device='cuda')",
                    ["genlm_trie_cuda"],
                    "pip install genlm-trie-cuda, "
                    "or pip install ./plugins/genlm-trie-cuda in a clone",
                )
            super().__init__(decode, **options)
        else:
            super().__init__(decode, device=device, **options)

    @property
    def device(self) -> str:
        """The device of the constructor; for None, `"cuda"` if the trie can use a GPU."""
        if self._device_name is not None:
            return self._device_name
        has_kernels = _DeviceTrie is not genlm.TokenCharacterTrie
        return "cuda" if has_kernels and torch.cuda.is_available() else "cpu"
