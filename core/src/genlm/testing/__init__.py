"""The conformance suite: properties of every correct engine and token trie, as checks.

A backend provides a target (`EngineTarget`, `TrieTarget`): tiny models with an oracle for
their rows. `genlm check NAME` runs every check against it, and so does one line in the
backend's tests:

    test_conformance = conformance_tests("toy")

The checks need `pip install 'genlm-core[testing]'`; importing this package does not.
"""

from typing import TYPE_CHECKING

from genlm.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the list of names that `lazy_exports` reads
    from genlm.testing.check import Check as Check
    from genlm.testing.check import CheckFailure as CheckFailure
    from genlm.testing.check import CheckTimeout as CheckTimeout
    from genlm.testing.check import NotApplicable as NotApplicable
    from genlm.testing.check import Skipped as Skipped
    from genlm.testing.check import engine_check as engine_check
    from genlm.testing.check import expect as expect
    from genlm.testing.check import trie_check as trie_check
    from genlm.testing.checks import all_checks as all_checks
    from genlm.testing.engine_fixture import EngineFixture as EngineFixture
    from genlm.testing.family_measurement import FamilyResult as FamilyResult
    from genlm.testing.family_measurement import measure_family as measure_family
    from genlm.testing.fixture import FULL as FULL
    from genlm.testing.fixture import QUICK as QUICK
    from genlm.testing.outcome import Outcome as Outcome
    from genlm.testing.plugin import conformance_tests as conformance_tests
    from genlm.testing.report import Report as Report
    from genlm.testing.run import Case as Case
    from genlm.testing.run import Run as Run
    from genlm.testing.run import Settings as Settings
    from genlm.testing.run import cases_of as cases_of
    from genlm.testing.run import prepared as prepared
    from genlm.testing.run import run_case as run_case
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
else:
    __getattr__, __dir__, __all__ = lazy_exports(__spec__)
