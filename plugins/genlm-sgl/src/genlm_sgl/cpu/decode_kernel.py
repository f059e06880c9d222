"""Runs the decode kernel of SGLang's CPU attention for extends of one token.

`TorchNativeAttnBackend` pads the queries of each extend to the whole sequence: for one token
after 512 cached ones it computes 513 queries and keeps the last. Its decode kernel computes
only that one. The methods are compared with the source that this module was written for.
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
        RuntimeWarning: A method differs from the expected source, and the backend was not
            changed.
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
    """Run two methods on their parts of a batch, with the arguments of the first."""
    query, output, *cache, rows, lengths, prefixes, news, encoder_lens = tensors
    # As many tokens as requests: each extends by one.
    if encoder_lens is None and query.shape[0] == lengths.shape[0]:
        # The only query is at the last position, which may attend to all others.
        decoding = options | {"causal": False}
        return decode(query, output, *cache, rows, lengths, None, **decoding)
    single = news == 1
    if encoder_lens is not None or not single.any():
        return extend(*tensors, **options)
    tokens = single.repeat_interleave(news)
    for wanted, chosen in ((tokens, single), (~tokens, ~single)):
        sizes = (prefixes[chosen], news[chosen])
        part = wanted.nonzero()[:, 0]  # not a mask: padding may follow the tokens
        queries = query[part]
        computed = output.new_empty((len(queries), *output.shape[1:]))
        arguments = (queries, computed, *cache, rows[chosen], lengths[chosen], *sizes, None)
        _extend(extend, decode, *arguments, **options)
        output[part] = computed
    return output
