"""The conformance suite: properties of every correct engine and token trie, as checks.

A backend provides a target (`EngineTarget`, `TrieTarget`): tiny models with an oracle for
their rows. `genlm check NAME` runs every check against it, and so does one line in the
backend's own tests:

    test_conformance = conformance_tests("toy")

The checks need `pip install 'genlm-core[testing]'`; importing this package does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test compares it with _HOME
    from genlm.testing.check import Check as Check
    from genlm.testing.check import engine_check as engine_check
    from genlm.testing.check import trie_check as trie_check
    from genlm.testing.checks import all_checks as all_checks
    from genlm.testing.engine_fixture import EngineFixture as EngineFixture
    from genlm.testing.failure import CheckFailure as CheckFailure
    from genlm.testing.failure import CheckTimeout as CheckTimeout
    from genlm.testing.failure import NotApplicable as NotApplicable
    from genlm.testing.failure import Skipped as Skipped
    from genlm.testing.failure import expect as expect
    from genlm.testing.family_measurement import FamilyResult as FamilyResult
    from genlm.testing.family_measurement import measure_family as measure_family
    from genlm.testing.fixture import FULL as FULL
    from genlm.testing.fixture import QUICK as QUICK
    from genlm.testing.fixture import Profile as Profile
    from genlm.testing.outcome import Outcome as Outcome
    from genlm.testing.plugin import conformance_tests as conformance_tests
    from genlm.testing.report import Report as Report
    from genlm.testing.run import Run as Run
    from genlm.testing.run import Settings as Settings
    from genlm.testing.run import prepared as prepared
    from genlm.testing.run import run_case as run_case
    from genlm.testing.selection import Case as Case
    from genlm.testing.selection import cases_of as cases_of
    from genlm.testing.target import EngineTarget as EngineTarget
    from genlm.testing.target import TrieTarget as TrieTarget
    from genlm.testing.tiny_families import Family as Family
    from genlm.testing.tiny_families import families as families
    from genlm.testing.tiny_model import TINY_LLAMA as TINY_LLAMA
    from genlm.testing.tiny_model import TINY_LOGITS as TINY_LOGITS
    from genlm.testing.tiny_model import TINY_VOCABULARY as TINY_VOCABULARY
    from genlm.testing.tiny_model import TinyModel as TinyModel
    from genlm.testing.tiny_model import random_model as random_model
    from genlm.testing.tiny_model import tiny_tokenizer as tiny_tokenizer
    from genlm.testing.trie_fixture import TrieFixture as TrieFixture

_HOME = {
    "check": "Check engine_check trie_check",
    "checks": "all_checks",
    "engine_fixture": "EngineFixture",
    "failure": "CheckFailure CheckTimeout NotApplicable Skipped expect",
    "family_measurement": "FamilyResult measure_family",
    "fixture": "FULL QUICK Profile",
    "outcome": "Outcome",
    "plugin": "conformance_tests",
    "report": "Report",
    "run": "Run Settings prepared run_case",
    "selection": "Case cases_of",
    "target": "EngineTarget TrieTarget",
    "tiny_families": "Family families",
    "tiny_model": (
        "TINY_LLAMA TINY_LOGITS TINY_VOCABULARY TinyModel random_model tiny_tokenizer"
    ),
    "trie_fixture": "TrieFixture",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - derived, so that it cannot be outdated


if not TYPE_CHECKING:  # as in `genlm`

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
