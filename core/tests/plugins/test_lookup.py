"""`get_backend` and `get_trie`: the right target, or an error that says what to do."""

import sys

import pytest

import genlm


def test_a_name_gives_the_target_of_its_spec(core):
    core.install("genlm-toy", "toy")
    assert genlm.get_backend("toy").distribution == "genlm-toy"


def test_asking_for_one_name_imports_no_other_plugin(core):
    other = core.install("genlm-other", "other")
    module = core.install("genlm-toy", "toy")
    genlm.get_backend("toy")
    assert module in sys.modules
    assert other not in sys.modules
    assert "genlm_core_plugin" not in sys.modules


def test_finding_a_backend_does_not_import_its_target(core):
    core.install("genlm-toy", "toy")
    assert genlm.find_backend("toy").target == "genlm_toy_backend:Backend"
    assert "genlm_toy_backend" not in sys.modules


def test_several_names_of_one_module_are_all_found(core):
    core.install("genlm-trie-cuda", "cuda", "parallel", kind="trie")
    assert genlm.get_trie("cuda") is genlm.get_trie("parallel")
    assert [info.status for info in genlm.list_backends("trie")] == ["ok", "ok"]


def test_an_engine_and_a_trie_may_share_a_name(core):
    core.install("genlm-a", "twin")
    core.install("genlm-b", "twin", kind="trie")
    assert genlm.get_backend("twin").distribution == "genlm-a"
    assert genlm.get_trie("twin").distribution == "genlm-b"


def message(call, *arguments):
    with pytest.raises(genlm.UnknownBackendError) as caught:
        call(*arguments)
    return str(caught.value)


def test_an_absent_plugin_of_this_project_is_named_with_its_command(core):
    core.install("genlm-hf", "hf")
    assert message(genlm.get_backend, "sgl") == (
        "no engine named 'sgl'. Installed: hf, reference. "
        "It is provided by genlm-sgl: pip install genlm-sgl, "
        "or pip install ./plugins/genlm-sgl in a clone"
    )
    assert message(genlm.get_trie, "parallel") == (
        "no trie named 'parallel'. Installed: none. "
        "It is provided by genlm-trie-cuda: pip install genlm-trie-cuda, "
        "or pip install ./plugins/genlm-trie-cuda in a clone"
    )


def test_a_misspelt_name_is_answered_with_the_nearest(site):
    site.install("genlm-hf", "hf")
    site.install("genlm-vllm", "vllm")
    assert message(genlm.get_backend, "vlm") == (
        "no engine named 'vlm'. Installed: hf, vllm. Did you mean 'vllm'?"
    )


def test_a_misspelt_name_of_an_absent_plugin_is_answered_with_its_command(core):
    assert message(genlm.get_backend, "vlm") == (
        "no engine named 'vlm'. Installed: reference. Did you mean 'vllm'? "
        "It is provided by genlm-vllm: pip install genlm-vllm, "
        "or pip install ./plugins/genlm-vllm in a clone"
    )


def test_an_absent_engine_asked_for_as_a_trie_is_not_offered_as_one(core):
    assert "genlm-sgl" not in message(genlm.get_trie, "sgl")


def test_an_engine_asked_for_as_a_trie_is_answered_with_the_right_call(core):
    assert message(genlm.get_trie, "reference") == (
        "no trie named 'reference'. Installed: none. "
        "'reference' is of kind engine: genlm.get_backend('reference')"
    )


def test_a_name_like_nothing_is_answered_with_the_command_that_lists(core):
    assert message(genlm.get_backend, "zzz") == (
        "no engine named 'zzz'. Installed: reference. "
        "`genlm plugins` shows every installed engine"
    )


def test_the_unknown_name_error_carries_its_data(core):
    with pytest.raises(LookupError) as caught:
        genlm.get_backend("zzz")
    assert (caught.value.name, caught.value.kind) == ("zzz", "engine")
    assert caught.value.installed == ("reference",)


@pytest.mark.parametrize("kind", [None, "tries"])
@pytest.mark.parametrize("name", [None, "reference"])
def test_another_kind_is_a_value_error(core, name, kind):
    with pytest.raises(ValueError, match="expected one of"):
        genlm.find_backend(name, kind)


@pytest.mark.parametrize("name", [":reference", "genlm-core:", "", "genlm-core"])
def test_half_of_a_full_name_names_nothing(core, name):
    with pytest.raises(genlm.UnknownBackendError):
        genlm.find_backend(name)


@pytest.mark.parametrize("call", [genlm.get_backend, genlm.get_trie])
def test_a_name_that_is_no_string_is_a_type_error(core, call):
    with pytest.raises(TypeError, match="string"):
        call(3)


def test_two_providers_of_a_name_are_an_error_only_when_it_is_asked_for(core):
    core.install("genlm-sgl", "sgl")
    core.install("their-sgl", "sgl")
    core.install("genlm-toy", "toy")
    assert genlm.get_backend("toy").distribution == "genlm-toy"
    with pytest.raises(genlm.AmbiguousBackendError) as caught:
        genlm.get_backend("sgl")
    assert caught.value.providers == ("genlm-sgl:sgl", "their-sgl:sgl")
    assert "'genlm-sgl:sgl' or 'their-sgl:sgl'" in str(caught.value)


@pytest.mark.parametrize("spelling", ["their-sgl:sgl", "Their_SGL:sgl"])
def test_the_full_name_settles_which_provider_is_meant(core, spelling):
    core.install("genlm-sgl", "sgl")
    core.install("their-sgl", "sgl")
    assert genlm.get_backend(spelling).distribution == "their-sgl"


def test_the_full_name_imports_only_the_provider_that_it_names(core):
    other = core.install("genlm-sgl", "sgl")
    core.install("their-sgl", "sgl")
    genlm.get_backend("their-sgl:sgl")
    assert other not in sys.modules


def test_a_broken_provider_leaves_its_name_to_the_other_and_is_logged(core, caplog):
    core.install("genlm-sgl", "sgl", body="1 / 0")
    core.install("their-sgl", "sgl")
    assert genlm.get_backend("sgl").distribution == "their-sgl"
    assert "genlm-sgl:sgl: ZeroDivisionError" in caplog.text


def test_a_missing_requirement_is_answered_with_the_command_that_installs_it(core):
    core.install("genlm-sgl", "sgl", extra='requires=("no_such_module", "json")')
    with pytest.raises(genlm.MissingRequirementError) as caught:
        genlm.get_backend("sgl")
    assert isinstance(caught.value, ImportError)
    assert caught.value.missing == ("no_such_module",)
    assert str(caught.value) == (
        "genlm-sgl:sgl needs no_such_module, which is not installed: pip install genlm-sgl"
    )


def test_a_plugin_may_give_its_own_install_command(core):
    extra = 'requires=("no_such_module",), install="make sgl"'
    core.install("genlm-sgl", "sgl", extra=extra)
    with pytest.raises(genlm.MissingRequirementError, match="make sgl"):
        genlm.get_backend("sgl")


def test_a_requirement_is_looked_up_without_being_imported(core):
    core.write("heavy_library", "raise AssertionError('imported')")
    core.install("genlm-toy", "toy", extra='requires=("heavy_library",)')
    assert genlm.find_backend("toy").status == "ok"


def test_another_plugin_interface_is_refused_when_asked_for(core):
    core.install("genlm-old", "old", extra="api=0")
    core.install("genlm-new", "new", extra="api=2")
    with pytest.raises(genlm.PluginApiError, match="upgrade genlm-old") as caught:
        genlm.get_backend("old")
    assert (caught.value.found, caught.value.expected) == (0, 1)
    with pytest.raises(genlm.PluginApiError, match="upgrade genlm-core"):
        genlm.get_backend("new")


def test_a_target_that_cannot_be_imported_is_a_broken_plugin_with_its_cause(core):
    core.install("genlm-toy", "toy")
    core.write("genlm_toy_backend", "1 / 0")
    with pytest.raises(
        genlm.BrokenPluginError, match=r"genlm-toy:toy.*ZeroDivisionError"
    ) as caught:
        genlm.get_backend("toy")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_target_that_cannot_be_called_is_a_broken_plugin(core):
    core.install("genlm-toy", "toy")
    core.write("genlm_toy_backend", "Backend = 3")
    with pytest.raises(genlm.BrokenPluginError, match="not callable"):
        genlm.get_backend("toy")


def test_an_error_of_genlms_own_from_a_target_passes_unchanged(core):
    core.install("genlm-toy", "toy")
    core.write("genlm_toy_backend", "import genlm\nraise genlm.ModelLoadError('no GPU')")
    with pytest.raises(genlm.ModelLoadError, match="no GPU"):
        genlm.get_backend("toy")
