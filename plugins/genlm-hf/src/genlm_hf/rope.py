"""Rotary embeddings whose frequencies depend on the longest sequence of a batch.

Dynamic NTK and longrope scaling choose their frequencies by the largest position in the
forward pass, so that even padding changes the rows (`ModelFacts.rope_by_longest`); dynamic NTK
also keeps the frequencies of the longest sequence so far.
"""

from __future__ import annotations

import torch


def reset_dynamic_rope(model: torch.nn.Module) -> None:
    """Reset dynamic rotary embeddings to their initial state.

    Otherwise a sequence would use the frequencies of an earlier, longer one.
    """
    for module in model.modules():
        if not hasattr(module, "original_max_seq_len"):
            continue
        for name in [n for n in vars(module) if n.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)
        for name in _original_frequencies(module):
            current = name.replace("original_", "")
            original = getattr(module, name)
            # A copy, because newer releases of transformers write into the current frequencies.
            setattr(module, current, original.to(getattr(module, current).device, copy=True))


def _original_frequencies(module: torch.nn.Module) -> list[str]:
    # An attribute or a buffer, depending on the release of transformers.
    names = [*vars(module), *(name for name, _ in module.named_buffers(recurse=False))]
    return [name for name in names if name.endswith("original_inv_freq")]
