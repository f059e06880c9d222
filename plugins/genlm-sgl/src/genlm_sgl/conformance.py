"""The targets by which `genlm check sgl` certifies the engine.

A tiny Llama with random weights, made on the spot (`genlm.testing.TinyModel`, which brings
its oracle), served in the ways that SGLang batches differently.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from genlm.testing import TINY_LLAMA, EngineTarget, TinyModel
from genlm_sgl.alternating import AlternatingEngine
from genlm_sgl.versions import CPU_PAGES_FROM, check_version, installed_version

__all__ = ["TinyLlama", "targets"]

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"enable_lora": True, "max_total_tokens": 4096},
    # Batches overlap, 40 tokens go through the model at a time, the prompt that would be the
    # last in chunks; pages hold 4 tokens, the cache a few prompts, the context 23 tokens.
    "cramped": {
        "chunked_prefill_size": 40,
        "context_length": 30,
        "disable_overlap_schedule": False,
        "enable_lora": True,
        "max_running_requests": 8,
        "max_total_tokens": 160,
        "page_size": 4,
    },
}
"""Engine options of each target."""

_TIGHT = (
    {"disable_radix_cache": True},
    {"max_total_tokens": 40, "page_size": 1},
    {"max_total_tokens": 64, "page_size": 16, "chunked_prefill_size": 16},
)
"""No prefix is kept; the longest sequence just fits; four pages."""


def targets(folder: Path) -> Iterator[EngineTarget]:
    """Yield a target per setting; all serve one model.

    Args:
        folder: Where the model is put.
    """
    model = TinyLlama(folder / "llama")
    paged = check_version(installed_version()) >= CPU_PAGES_FROM
    for name, options in SETTINGS.items():
        yield EngineTarget(
            model=name,
            build=functools.partial(_alternating, model, _fitting(options, paged=paged)),
            oracle=model.logprobs,
            adapters=model.adapters,
            timeout_s=240.0,  # the first engine imports SGLang
            tight_options=[_fitting(options, paged=paged) for options in _TIGHT],
            shared=True,
        )


def _fitting(options: Mapping[str, Any], *, paged: bool) -> Mapping[str, Any]:
    """The options, with pages of one token for versions that have no others on a CPU."""
    return options if paged else {**options, "page_size": 1}


def _alternating(
    model: TinyLlama, options: Mapping[str, Any], **more: Any
) -> AlternatingEngine:
    return AlternatingEngine(functools.partial(model.engine, options, **more))


class TinyLlama(TinyModel):
    """A tiny Llama with two adapters, as SGLang serves it.

    Args:
        folder: Where to put it.
        **settings: Of its config, beside the usual ones.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        # On a CPU, SGLang makes inner layers a multiple of 64 wide and adapters must be, too;
        # who changes queries must also change values.
        super().__init__(
            folder,
            {**TINY_LLAMA, "intermediate_size": 64, **settings},
            adapters=("red", "blue"),
            lora={"target_modules": ["q_proj", "v_proj", "down_proj"]},
        )

    def engine(self, options: Mapping[str, Any], **more: Any) -> Any:
        """Serve the model, on the CPU in float32."""
        from genlm_sgl.engine import SGLEngine

        wanted = {"device": "cpu", "dtype": "float32", **options, **more}
        return SGLEngine(self.path, engine_opts=wanted)
