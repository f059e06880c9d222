"""Names of genlm 1.0 that still work, with a warning."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from genlm.prefix import ServeOptions
from genlm.prefix.renamed import EngineStatistics

PATHS = ("packed", "slot_cache", "padded")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"tier": "packed"}, "packed"),
        ({"tier": "gathered"}, "slot_cache"),
        ({"execution_path": "gathered"}, "slot_cache"),
    ],
)
def test_older_names_and_values_of_the_execution_path_warn(
    given: dict[str, Any], path: str
) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"until genlm 1.1; use execution_path='{path}'"
    ):
        assert ServeOptions(paths=PATHS, **given).execution_path == path


def test_the_current_name_and_values_do_not_warn() -> None:
    for path in (*PATHS, None):
        assert ServeOptions(paths=PATHS, execution_path=path).execution_path == path


def test_both_names_at_once_and_unknown_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="give execution_path only"):
        ServeOptions(paths=PATHS, execution_path="packed", tier="packed")
    with pytest.raises(ValueError, match="no execution path 'fast'; choose one of 'packed', "):
        ServeOptions(paths=PATHS, execution_path="fast")


def test_statistics_can_be_read_by_their_older_keys() -> None:
    figures = EngineStatistics(execution_path="slot_cache", execution_path_reason="why")
    with pytest.warns(DeprecationWarning, match="'tier' works until genlm 1.1; use 'exec"):
        assert figures["tier"] == "gathered"
    with pytest.warns(DeprecationWarning, match="use 'execution_path_reason'"):
        assert figures.copy().get("tier_reason") == "why"
    assert "tier" in figures
    assert "tokens" not in figures
    assert figures.get("tokens", 3) == 3
    with pytest.raises(KeyError):
        figures["tokens"]
    assert set(dataclasses.asdict(_Holder(figures))["figures"]) == {
        "execution_path",
        "execution_path_reason",
    }


@dataclasses.dataclass
class _Holder:
    figures: EngineStatistics
