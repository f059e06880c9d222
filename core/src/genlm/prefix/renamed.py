"""Names of genlm 1.0 that are accepted with a `DeprecationWarning` until genlm 1.1."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["EngineStatistics", "current_execution_path"]

_VALUES = {"gathered": "slot_cache"}
_OLD_VALUES = {new: old for old, new in _VALUES.items()}
_KEYS = {"tier": "execution_path", "tier_reason": "execution_path_reason"}


def current_execution_path(execution_path: str | None, tier: str | None) -> str | None:
    """Return the option `execution_path`, also if it was given by an older name or value.

    Raises:
        ValueError: Both `execution_path` and its older name `tier` were given.
    """
    if tier is None and execution_path not in _VALUES:
        return execution_path
    if tier is not None and execution_path is not None:
        raise ValueError("tier is the older name of execution_path; give execution_path only")
    old = f"execution_path={execution_path!r}" if tier is None else f"tier={tier!r}"
    given = execution_path if tier is None else tier
    new = _VALUES.get(str(given), given)
    # 6: past `ServeOptions` and the engine's constructor.
    _warn(f"the option {old}", f"execution_path={new!r}", stacklevel=6)
    return new


class EngineStatistics(dict[str, int | float | str]):
    """An engine's statistics, which can also be read by the keys `tier` and `tier_reason`."""

    def __missing__(self, key: str) -> int | float | str:
        """Return the value of an older key; `tier` has the values of genlm 1.0."""
        if key not in _KEYS:
            raise KeyError(key)
        _warn(f"the statistic {key!r}", repr(_KEYS[key]))
        value = self[_KEYS[key]]
        return _OLD_VALUES.get(str(value), value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_KEYS.get(str(key), key))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, `default` if it is missing."""
        try:
            return self[key]
        except KeyError:
            return default

    def copy(self) -> EngineStatistics:
        """Return statistics of the same values."""
        return EngineStatistics(self)


def _warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    message = f"{old} works until genlm 1.1; use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
