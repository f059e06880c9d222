"""`dtype_name`: canonical names of floating-point types."""

from __future__ import annotations

_ALIASES = {
    "float32": ("float", "fp32", "f32", "single"),
    "float16": ("half", "fp16", "f16"),
    "bfloat16": ("bf16",),
    "float64": ("double", "fp64", "f64"),
}
_NAMES = {spelling: name for name, aliases in _ALIASES.items() for spelling in (name, *aliases)}


def dtype_name(dtype: object) -> str:
    """Return the name that torch, numpy, MLX, vLLM and SGLang all understand.

    Args:
        dtype: A name such as `"bf16"`, `"half"`, `"torch.float32"`, or a dtype of torch, numpy
            or MLX. `"auto"`, the dtype of the checkpoint, is returned as it is.

    Returns:
        `"float32"`, `"float16"`, `"bfloat16"`, `"float64"` or `"auto"`.

    Raises:
        ValueError: The name or type is unknown.
    """
    text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    name = text.rpartition(".")[2].strip().lower()
    if name == "auto":
        return name
    if name not in _NAMES:
        raise ValueError(
            f"no dtype {dtype!r}; use 'float32', 'bfloat16' or 'float16' (or 'fp32', 'bf16', "
            f"'fp16', a torch.dtype), or 'auto' for that of the checkpoint"
        )
    return _NAMES[name]
