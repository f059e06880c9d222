"""Conversion of arguments, arrays and tensors, to numpy arrays in main memory; index ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def host_array(values: Any, argument: str) -> npt.NDArray[Any]:
    """Return numbers as a numpy array, which may share the memory of an array or a tensor.

    A tensor may be on any device and may require gradients. Numbers of dtypes that numpy lacks,
    such as bfloat16, become float32.

    Raises:
        TypeError: The values of a tensor cannot be read, for example on the meta device.
        ValueError: Lists have different lengths, or have objects that numpy cannot convert.
    """
    if not hasattr(values, "detach"):
        try:
            return np.asarray(values)
        except ValueError as error:
            if "inhomogeneous" not in str(error):
                raise ValueError(f"{argument} is not an array of numbers: {error}") from error
            raise ValueError(f"{argument} has lists of different lengths") from error
    array: npt.NDArray[Any]
    try:
        array = values.detach().cpu().numpy()
    except (TypeError, RuntimeError):
        check_readable(values, argument)
        array = values.detach().cpu().float().numpy()  # of a dtype that numpy does not have
    return array


def native_array(array: npt.NDArray[Any], dtype: npt.DTypeLike = None) -> npt.NDArray[Any]:
    """Return an array for `torch.from_numpy`: of native byte order, contiguous and writable.

    It is copied if it has another byte order, strides or dtype, or is read-only.
    """
    dtype = array.dtype.newbyteorder("=") if dtype is None else dtype
    if array.flags.carray and array.dtype == dtype:
        return array
    return np.require(array, dtype, ["C_CONTIGUOUS", "WRITEABLE"])


def signed_index(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers or booleans as numbers that fit into int64; an empty array as int64.

    A cast of an unsigned number above the range would make it negative, which is a valid index
    and stands for no token; it becomes the largest int64.
    """
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max)).astype(np.int64)
    return array if array.size else array.astype(np.int64)


def ranges(
    begins: npt.NDArray[np.integer[Any]] | int, counts: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int64]:
    """Concatenate the ranges of integers that begin at `begins` and have `counts` elements.

    Args:
        begins: First element of each range, shape `(n,)`, or one number for all ranges.
        counts: Shape `(n,)`.
    """
    if not len(counts):
        return np.empty(0, np.int64)
    ends = np.cumsum(counts)
    offsets = begins - ends + counts
    # Adjacent ranges are one: few long runs are repeated faster than many short ones.
    last = np.append(np.flatnonzero(offsets[1:] != offsets[:-1]), len(counts) - 1)
    indices: npt.NDArray[np.int64] = offsets[last].repeat(np.diff(ends[last], prepend=0))
    indices += np.arange(len(indices))
    return indices


def check_readable(tensor: Any, argument: str) -> None:
    """Reject a tensor of torch whose values cannot be read as an array.

    Raises:
        TypeError: The tensor is on the device `meta`, nested, quantised or sparse.
    """
    if problem := unreadable_tensor(tensor):
        raise TypeError(f"{argument} must be an array or a dense tensor; found {problem}")


def unreadable_tensor(tensor: Any) -> str:
    """Describe a tensor of torch whose values cannot be read; return `""` for others."""
    if tensor.is_meta:
        return "a tensor on the device meta, which has no values"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantised tensor"
    layout = str(tensor.layout)
    return "" if layout == "torch.strided" else f"a tensor of layout {layout}"
