"""`list_backends` and the variables that allow, disable and check plugins."""

import copy
import dataclasses
import pickle
import sys

import pytest

import genlm
from genlm.core.base.errors import PluginError


def status():
    return {info.provider: info.status for info in genlm.list_backends()}


def test_an_entry_tells_what_the_spec_and_the_distribution_say(core):
    extra = "summary='Plays', capabilities=('lora',), requires=('json',), conformance='toy.c:t'"
    core.install("Genlm_Toy", "toy", extra=extra)
    (info,) = [info for info in genlm.list_backends("engine") if info.name == "toy"]
    assert info == genlm.BackendInfo(
        name="toy",
        kind="engine",
        status="ok",
        provider="genlm-toy:toy",
        distribution="genlm-toy",
        version="1.0",
        api=1,
        summary="Plays",
        capabilities=("lora",),
        requires=("json",),
        target="Genlm_Toy_backend:Backend",
        conformance="toy.c:t",
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"


def test_a_list_can_be_read_as_it_is_printed(core):
    core.install("genlm-b", "b", extra='requires=("no_such_module",)')
    text = str([info for info in genlm.list_backends() if info.name == "b"])
    assert text == "[<engine genlm-b:b 1.0: missing, needs no_such_module>]"


def test_the_list_is_by_name_and_of_the_kind_asked_for(core):
    core.install("genlm-b", "b")
    core.install("genlm-a", "a", kind="trie")
    assert [info.name for info in genlm.list_backends()] == ["a", "b", "reference"]
    assert [info.name for info in genlm.list_backends("engine")] == ["b", "reference"]
    assert [info.name for info in genlm.list_backends(kind="trie")] == ["a"]
    with pytest.raises(ValueError, match="expected one of"):
        genlm.list_backends("tries")


def test_a_broken_plugin_of_unknown_kind_is_in_every_list(core):
    core.install("genlm-toy", "toy", body="1 / 0")
    assert [i.name for i in genlm.list_backends("trie")] == ["toy"]
    assert [i.kind for i in genlm.list_backends("trie")] == [None]


def test_listing_imports_no_target(core):
    core.install("genlm-toy", "toy")
    genlm.list_backends()
    assert "genlm_toy_plugin" in sys.modules
    assert "genlm_toy_backend" not in sys.modules


def test_a_missing_library_is_listed_with_its_command(core):
    core.install("genlm-toy", "toy", extra='requires=("no_such_module",)')
    (info,) = [info for info in genlm.list_backends() if info.name == "toy"]
    assert (info.status, info.missing) == ("missing", ("no_such_module",))
    assert info.install == "pip install genlm-toy"


def test_both_providers_of_a_name_are_listed_as_ambiguous(core):
    core.install("genlm-sgl", "sgl")
    core.install("their-sgl", "sgl", extra='requires=("no_such_module",)')
    assert status() == {
        "genlm-core:reference": "ok",
        "genlm-sgl:sgl": "ambiguous",
        "their-sgl:sgl": "ambiguous",
    }


@pytest.mark.parametrize(
    "value", ["toy", "genlm-toy", "Genlm_Toy", "genlm-toy:toy", "x, toy", "x,genlm-toy:toy,"]
)
def test_a_disabled_plugin_is_listed_but_neither_imported_nor_found(core, monkeypatch, value):
    module = core.install("genlm-toy", "toy")
    core.install("genlm-a", "a")
    monkeypatch.setenv("GENLM_DISABLE_PLUGINS", value)
    assert status() == {
        "genlm-a:a": "ok",
        "genlm-core:reference": "ok",
        "genlm-toy:toy": "disabled",
    }
    assert module not in sys.modules
    with pytest.raises(genlm.UnknownBackendError) as caught:
        genlm.get_backend("toy")
    assert str(caught.value) == (
        "no engine named 'toy'. Installed: a, reference. "
        "genlm-toy:toy is installed, but disabled: GENLM_DISABLE_PLUGINS lists it"
    )
    assert genlm.get_backend().distribution == "genlm-a"


@pytest.mark.parametrize("value", ["toy", "genlm-toy", "genlm-toy:toy"])
def test_an_allow_list_disables_the_others_but_not_the_core(core, monkeypatch, value):
    core.install("genlm-toy", "toy")
    core.install("genlm-a", "a")
    monkeypatch.setenv("GENLM_PLUGINS", value)
    assert status() == {
        "genlm-a:a": "disabled",
        "genlm-core:reference": "ok",
        "genlm-toy:toy": "ok",
    }
    with pytest.raises(genlm.UnknownBackendError, match="GENLM_PLUGINS does not list it"):
        genlm.get_backend("a")


def test_an_empty_allow_list_allows_everything(core, monkeypatch):
    core.install("genlm-toy", "toy")
    monkeypatch.setenv("GENLM_PLUGINS", " ")
    assert set(status().values()) == {"ok"}


@pytest.mark.parametrize(("value", "meant"), [("toy,tyo", "toy"), ("genlm_toys", "genlm-toy")])
def test_an_allow_list_with_a_misspelt_name_is_an_error(core, monkeypatch, value, meant):
    core.install("genlm-toy", "toy")
    monkeypatch.setenv("GENLM_PLUGINS", value)
    wrong = value.rpartition(",")[2]
    for call in (genlm.list_backends, lambda: genlm.get_backend("toy"), genlm.get_backend):
        with pytest.raises(genlm.UnknownBackendError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(
            f"no plugin named {wrong!r} (from GENLM_PLUGINS). Installed: reference, toy. "
        )
        assert message.endswith(f"Did you mean {meant!r}?")
    monkeypatch.setenv("GENLM_PLUGINS", "Genlm_Toy, genlm-core:reference")
    assert set(status().values()) == {"ok"}


def test_disabling_wins_over_allowing_and_reaches_the_core(core, monkeypatch):
    core.install("genlm-toy", "toy")
    monkeypatch.setenv("GENLM_PLUGINS", "toy")
    monkeypatch.setenv("GENLM_DISABLE_PLUGINS", "toy,reference")
    assert set(status().values()) == {"disabled"}


def test_disabling_one_provider_settles_an_ambiguous_name(core, monkeypatch):
    core.install("genlm-sgl", "sgl")
    core.install("their-sgl", "sgl")
    monkeypatch.setenv("GENLM_DISABLE_PLUGINS", "genlm-sgl")
    assert genlm.get_backend("sgl").distribution == "their-sgl"


@pytest.mark.parametrize(
    "error",
    [
        genlm.UnknownBackendError("vlm", "engine", ["vllm", "hf"], "Did you mean 'vllm'?", "x"),
        genlm.AmbiguousBackendError("sgl", "engine", ["b:sgl", "a:sgl"]),
        genlm.MissingRequirementError("a:sgl", ["sglang"], "pip install a"),
        genlm.BrokenPluginError("a:sgl", "no disk"),
        genlm.PluginApiError("a:sgl", 0, 1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_plugin_error_survives_copying_and_pickling_with_its_data(error):
    assert isinstance(error, PluginError)
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error) != {}
