"""`ParallelTokenCharacterTrie` as published."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

import genlm
from genlm.backend.trie.base import TokenCharacterTrie

__all__ = ["ParallelTokenCharacterTrie"]


def _installed() -> Any:
    """The trie of genlm-trie-cuda; without it the core's, which is on the CPU."""
    try:
        return genlm.get_trie("cuda")
    except genlm.PluginError:
        return genlm.TokenCharacterTrie


_DeviceTrie = _installed()


class ParallelTokenCharacterTrie(TokenCharacterTrie, _DeviceTrie):  # type: ignore[misc, valid-type]
    """Maps to the trie `"cuda"` of genlm-trie-cuda, without it to the core's.

    Results of the reductions are float32, as published.

    Args:
        decode: As for `TokenCharacterTrie`.
        device: `"cuda"` or `"cpu"`; None reduces weights on the device they are on.
        **options: Further ones of the trie.

    Raises:
        MissingRequirementError: `"cuda"` without genlm-trie-cuda.
        ValueError: Another device.
    """

    _dtype = np.float32

    def __init__(
        self, decode: Any, device: Literal["cpu", "cuda"] | None = None, **options: Any
    ) -> None:
        if device not in {None, "cpu", "cuda"}:
            raise ValueError(f"device={device!r}: expected 'cpu', 'cuda' or None")
        self._asked_device = device
        if _DeviceTrie is genlm.TokenCharacterTrie:
            if device == "cuda":
                raise genlm.MissingRequirementError(
                    "ParallelTokenCharacterTrie(device='cuda')",
                    ["genlm_trie_cuda"],
                    "pip install 'genlm-backend[cuda]'",
                )
            super().__init__(decode, **options)
        else:
            super().__init__(decode, device=device, **options)

    @property
    def device(self) -> str:
        """As given; for None `"cuda"` if the trie can use a GPU and there is one."""
        if self._asked_device is not None:
            return self._asked_device
        has_kernels = _DeviceTrie is not genlm.TokenCharacterTrie
        return "cuda" if has_kernels and torch.cuda.is_available() else "cpu"
