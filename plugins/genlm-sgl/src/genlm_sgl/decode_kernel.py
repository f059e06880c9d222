"""Runs the decode kernel of SGLang's CPU attention for extends of one token.

`TorchNativeAttnBackend` pads the queries of each extend to the whole sequence: for one token
after 512 cached ones it computes 513 queries and keeps the last. Its decode kernel computes the
one. The methods involved are compared with the source that this module was written for.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["use_decode_kernel"]

_SOURCES = {
    "forward_extend": "9d94d3cc90d249c5",
    "_run_sdpa_forward_extend": "cd0f84f549310107",
    "_run_sdpa_forward_decode": "062856df45d2fe12",
}
"""Methods of `TorchNativeAttnBackend`, and the first digits of the SHA-256 of their source.
SGLang 0.5.20 to 0.5.23 have them in common."""


def use_decode_kernel(backend: Any, version: str) -> bool:
    """Have an attention backend run extends of one token as decodes.

    Args:
        backend: SGLang's attention backend; changed if it is `TorchNativeAttnBackend` itself.
        version: SGLang's version, for the warning.

    Returns:
        Whether the backend was changed.

    Warns:
        RuntimeWarning: A method is not the one that this module was written for, and the
            backend was left as it is.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if type(backend) is not TorchNativeAttnBackend:
        return False
    for name, digest in _SOURCES.items():
        if _digest(getattr(TorchNativeAttnBackend, name, None)) != digest:
            warnings.warn(
                f"TorchNativeAttnBackend.{name} of SGLang {version} is not the code that "
                f"genlm-sgl was written for, so contexts that become requests of their own "
                f"are computed slowly on this CPU; rows are right. Use SGLang 0.5.23, or "
                f"compare {__name__} with the new code",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
    extend = backend._run_sdpa_forward_extend  # noqa: SLF001
    backend._run_sdpa_forward_extend = functools.partial(  # noqa: SLF001
        _extend,
        extend,
        backend._run_sdpa_forward_decode,  # noqa: SLF001
    )
    return True


def _digest(method: Any) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # no source, or no such method
        return None


def _extend(
    extend: Callable[..., Any], decode: Callable[..., Any], *tensors: Any, **options: Any
) -> Any:
    """Run one of two methods with the arguments of `_run_sdpa_forward_extend`."""
    *common, seq_lens, _, _, encoder_lens = tensors
    query = common[0]
    # Every extend has a token at least.
    if encoder_lens is None and query.shape[0] == seq_lens.shape[0]:
        # The only query is at the last position, which may attend to all others.
        return decode(*common, seq_lens, None, **(options | {"causal": False}))
    return extend(*tensors, **options)
