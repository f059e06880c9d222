"""Checks of arguments and token ids."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np

from genlm.core.base.arrays import unreadable_tensor
from genlm.core.base.errors import (
    EmptySequenceError,
    TokenIdError,
    TokenTypeError,
)

if TYPE_CHECKING:
    import torch

Integers: TypeAlias = "Sequence[SupportsIndex] | np.ndarray[Any, Any] | torch.Tensor"
Stop: TypeAlias = (
    "str | bytes | SupportsIndex | Iterable[str | bytes | SupportsIndex] | torch.Tensor"
)

T = TypeVar("T")

_SHORT = 512
"""Below this length, Python's `max` is faster than numpy's."""

_MAX_SIZE = 2**32
"""Maximum number of members, of which the indices alone take 32 GiB."""

_BOOLEAN_DTYPES = frozenset({"bool", "torch.bool"})


def checked_token_ids(token_ids: Integers, vocab_size: int) -> tuple[tuple[int, ...], bytes]:
    """Return token ids as a tuple of Python integers, and packed in 32 bits each."""
    if not (type(token_ids) is list or type(token_ids) is tuple):
        token_ids = checked_integers(token_ids)
    if not token_ids:
        raise EmptySequenceError
    try:
        packed = array("I", token_ids)  # rejects non-integers and negative numbers
    except (OverflowError, TypeError):
        ids = _integers(token_ids, "token ids")
        raise outside_vocabulary(ids, vocab_size) from None
    ids = tuple(packed)
    largest = max(ids) if len(ids) < _SHORT else int(np.frombuffer(packed, np.uintc).max())
    if largest >= vocab_size:
        raise outside_vocabulary(ids, vocab_size)
    if largest <= 1:
        _reject_booleans(token_ids, "token ids")
    return ids, packed.tobytes()


def checked_stop(
    stop: Stop | None, vocab_size: int, eos_token_id: int | None
) -> tuple[frozenset[int], tuple[bytes, ...]]:
    """Return the token ids and the texts, as bytes, that end a continuation.

    Args:
        stop: One or several token ids or texts; None for `eos_token_id`.
        vocab_size: Number of token ids.
        eos_token_id: End-of-text id of the vocabulary, None if it has none.
    """
    if stop is None:
        return frozenset(() if eos_token_id is None else (eos_token_id,)), ()
    items: Any = [stop] if isinstance(stop, (str, bytes)) or is_integer(stop) else stop
    if not isinstance(items, Iterable):
        raise TypeError(f"stop={_short_repr(stop)}; expected texts or token ids")
    texts: list[bytes] = []
    ids: list[int] = []
    for item in items:
        if isinstance(item, (str, bytes)):
            texts.append(item.encode() if isinstance(item, str) else bytes(item))
        elif is_integer(item):
            ids.append(index(item))
        else:
            raise TypeError(
                f"stop has {_short_repr(item)}; expected str or bytes, or token ids"
            )
    if b"" in texts:
        raise ValueError("stop has an empty text, which would end every continuation at once")
    return frozenset(checked_ids(ids, vocab_size, "stop")), tuple(texts)


def checked_count(name: str, value: Any, vocab_size: int) -> int:
    """Return a number of tokens, at least 1."""
    number = checked_integer(name, value, 1)
    if number > vocab_size:
        raise ValueError(
            f"{name}={number} of a vocabulary of {vocab_size} ids; it must be {vocab_size} or "
            f"less"
        )
    return number


def checked_ids(values: Integers, vocab_size: int, argument: str = "") -> tuple[int, ...]:
    """Return token ids, possibly none, as a tuple of Python integers."""
    ids = checked_integers(values, argument or "token ids")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise outside_vocabulary(ids, vocab_size, argument)
    return ids


def checked_integers(values: Integers, argument: str = "token ids") -> tuple[int, ...]:
    """Return a flat sequence of integers as a tuple of Python integers.

    Sets, mappings and generators are rejected: their order is undefined, or they can be
    read only once. Arrays of booleans are masks and are also rejected.
    """
    array_values = getattr(values, "tolist", None)
    if array_values is None and (
        isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Sequence)
    ):
        raise TokenTypeError(_describe_non_sequence(values), argument)
    if hasattr(values, "detach") and (problem := unreadable_tensor(values)):
        raise TokenTypeError(problem, argument)
    if str(getattr(values, "dtype", "")) in _BOOLEAN_DTYPES:
        raise TokenTypeError(
            "an array of booleans, a mask; its ids are mask.nonzero()", argument
        )
    if getattr(values, "ndim", 1) > 1:
        shape = tuple(getattr(values, "shape", ()))
        hint = " For a single row, pass array[0]" if shape[:1] == (1,) else ""
        raise TokenTypeError(
            f"an array of shape {shape}; methods with `batch` in their name take several "
            f"sequences.{hint}",
            argument,
        )
    return _integers(values if array_values is None else array_values(), argument)


def checked_batch(
    sequences: Sequence[T] | np.ndarray[Any, Any] | torch.Tensor,
    remedy: str = "call the method without `batch`",
) -> Iterable[T]:
    """Return a batch of sequences unchanged; reject one sequence with `remedy` in the error."""
    if hasattr(sequences, "input_ids"):
        raise TypeError(
            f"expected several sequences of token ids; found {type(sequences).__name__}: pass "
            f"its input_ids as lists without padding, or [llm.encode(text) for text in texts]"
        )
    is_list = isinstance(sequences, (list, tuple)) and len(sequences) > 1
    if is_list and isinstance(cast("Sequence[object]", sequences)[0], int):
        raise TokenTypeError(
            f"one, {_short_repr(sequences)}: pass [ids], or {remedy}",
            "a batch",
            "several sequences of token ids, such as [[1, 2], [3]]",
        )
    if not isinstance(sequences, Iterable) or getattr(sequences, "ndim", 1) == 0:
        raise TypeError(
            f"expected several sequences of token ids, such as [[1, 2], [3]]; found "
            f"{type(sequences).__name__} {_short_repr(sequences)}"
        )
    return sequences


def checked_builder(build_engine: Callable[[], T]) -> Callable[[], T]:
    """Return a function unchanged; reject other objects."""
    if is_model_object(build_engine):
        raise TypeError(
            f"found the model {type(build_engine).__name__}; expected a function without "
            f"arguments that returns an engine. To serve a model: "
            f'genlm.load_model(model, "hf", tokenizer=tokenizer), with the name of an engine'
        )
    if not callable(build_engine):
        raise TypeError(
            f"build_engine={_short_repr(build_engine)}; expected a function without arguments "
            f"that returns the engine. genlm.load_model loads a model by its name"
        )
    return build_engine


def options_mapping(name: str, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the options of an engine's library, `{}` for None.

    Args:
        name: Name of the argument, such as `"engine_opts"`, for the message.
        options: The argument.

    Raises:
        TypeError: `options` is not a mapping.
    """
    found: object = {} if options is None else options
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{name}={_short_repr(options)}; expected a mapping from names of options to "
            f"values, such as {{'name': value}}"
        )
    return found


def is_sequence_like(value: object) -> bool:
    """Whether an argument has a length and, if it is an array, at least one dimension."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def is_model_object(value: object) -> bool:
    """Whether an argument is a model of torch or MLX, not a model name or a function."""
    return callable(getattr(value, "parameters", None)) and not isinstance(value, type)


def checked_integer(name: str, value: Any, minimum: int) -> int:
    """Return an integer of any kind as an `int`; reject values below `minimum`."""
    if type(value) is int:  # most frequent
        number = value
    elif is_integer(value):
        number = index(value)
    else:
        raise TypeError(f"{name}={_short_repr(value)}; expected an integer, {minimum} or more")
    if number < minimum:
        raise ValueError(f"{name}={number}; it must be {minimum} or more")
    return number


def checked_size(size: Any, minimum: int) -> int:
    """Return a number of members or particles."""
    number = checked_integer("size", size, minimum)
    if number > _MAX_SIZE:
        raise ValueError(f"size={number}; it must be {_MAX_SIZE} or less")
    return number


def checked_number(name: str, value: Any) -> float:
    """Return a finite, non-negative number as a float."""
    if type(value) is float:  # most frequent
        number: float | None = value
    else:
        number = None if isinstance(value, (str, bytes)) else _float(value)
    if number is None:
        raise TypeError(f"{name}={_short_repr(value)}; expected a number, 0 or more")
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={number}; it must be finite and not negative")
    return number


def _float(value: Any) -> float | None:
    if _is_boolean(value) or getattr(value, "ndim", 0) > 0:
        return None
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor without a value
        return None
    except OverflowError:  # an integer too large
        return math.inf


def _integers(values: Any, argument: str) -> tuple[int, ...]:
    try:
        ids = tuple(map(index, values))
    except TypeError:
        raise TokenTypeError(_describe_non_integers(values), argument) from None
    if ids and max(ids) <= 1:
        _reject_booleans(values, argument)
    return ids


def _reject_booleans(values: Iterable[Any], argument: str) -> None:
    """Reject a mask, whose booleans are the integers 0 and 1 in Python."""
    if bool in map(type, values):
        hint = "a mask; its ids are [i for i, allowed in enumerate(mask) if allowed]"
        raise TokenTypeError(f"booleans, {hint}", argument)


def outside_vocabulary(
    ids: tuple[int, ...], vocab_size: int, argument: str = ""
) -> TokenIdError:
    """Return the error of the first id that is outside the vocabulary."""
    position = next(i for i, value in enumerate(ids) if not 0 <= value < vocab_size)
    return TokenIdError(ids[position], position, vocab_size, argument)


def _describe_non_sequence(values: object) -> str:
    hint = (
        "; llm.encode converts text to ids"
        if isinstance(values, str)
        else _id_attribute_hint(values)
    )
    if hasattr(values, "input_ids"):
        return f"{type(values).__name__}; pass its input_ids, or llm.encode(text)"
    if hasattr(values, "ids"):
        return f"{type(values).__name__}; pass its ids, or llm.encode(text)"
    if is_integer(values):
        hint = f"; a sequence of this id is [{values}]"
    if hasattr(values, "tokens"):  # a population
        hint = "; methods with `batch` in their name take several sequences"
    return f"{type(values).__name__} {_short_repr(values)}{hint}"


def _id_attribute_hint(value: object) -> str:
    """Return a hint at the attribute of an object, such as a draw, that contains ids."""
    for name in ("token_id", "token_ids"):
        if hasattr(value, name):
            return f"; pass its {name}"
    return ""


def _describe_non_integers(values: Any) -> str:
    if hint := _id_attribute_hint(values):
        return f"{type(values).__name__} {_short_repr(values)}{hint}"
    if not isinstance(values, Iterable):
        return f"a single {type(values).__name__}, {_short_repr(values)}"
    position, value = next(pair for pair in enumerate(values) if not is_integer(pair[1]))
    description = f"{type(value).__name__} {_short_repr(value)} at position {position}"
    if hint := _id_attribute_hint(value):
        description += hint
    elif isinstance(value, (list, tuple)):
        description += "; methods with `batch` in their name take several sequences"
    return description


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of any kind, but not a boolean."""
    if _is_boolean(value):
        return False
    try:
        index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without a value
        return False
    return True


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in _BOOLEAN_DTYPES


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
