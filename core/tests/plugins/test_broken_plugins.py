"""Every way to be broken: reported with its reason, fatal to nobody else."""

import sys

import pytest

import genlm

BROKEN = {
    "the module raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "the module exits": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "the module imports what is absent": ("import no_such_module", "No module named"),
    "the module registers no hook": ("x = 1", "yields no BackendSpec"),
    "the hook is not marked": ("def genlm_backends(): yield 1", "yields no BackendSpec"),
    "the hook is misspelt": (
        """
        @genlm.hookimpl
        def genlm_backend():
            yield BackendSpec("toy", "engine", "a:b")
        """,
        "unknown hook 'genlm_backend'",
    ),
    "the hook wants an argument": (
        """
        @genlm.hookimpl
        def genlm_backends(registry):
            yield BackendSpec("toy", "engine", "a:b")
        """,
        "'registry'",
    ),
    "the hook raises": (
        """
        @genlm.hookimpl
        def genlm_backends():
            raise OSError("no disk")
        """,
        "OSError: no disk",
    ),
    "the hook raises after a spec": (
        """
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("toy", "engine", "a:b")
            raise OSError("no disk")
        """,
        "OSError: no disk",
    ),
    "the hook yields something else": (
        """
        @genlm.hookimpl
        def genlm_backends():
            yield {"name": "toy"}
        """,
        "yielded dict, expected BackendSpec",
    ),
    "the hook returns a bare spec": (
        """
        @genlm.hookimpl
        def genlm_backends():
            return BackendSpec("toy", "engine", "a:b")
        """,
        "returned BackendSpec; yield",
    ),
    "the hook yields nothing": (
        """
        @genlm.hookimpl
        def genlm_backends():
            return []
        """,
        "yields no BackendSpec",
    ),
    "the spec has another name": (
        """
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("tyo", "engine", "a:b")
        """,
        "entry point is named 'toy' but it yields 'tyo'",
    ),
    "the spec comes twice": (
        """
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("toy", "engine", "a:b")
            yield BackendSpec("toy", "engine", "a:c")
        """,
        "yields the engine 'toy' twice",
    ),
    "the spec has an unknown field": (
        """
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("toy", "engine", "a:b", colour="red")
        """,
        "colour",
    ),
    "the spec is malformed": (
        """
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("toy", "engine", "no_attribute")
        """,
        "target='no_attribute': expected 'package.module:attribute'",
    ),
}


@pytest.fixture(params=BROKEN.values(), ids=BROKEN)
def reason(request, core):
    body, reason = request.param
    core.install("genlm-toy", "toy", body=body)
    core.install("genlm-good", "good")
    return reason


def test_a_broken_plugin_raises_its_reason_when_it_is_asked_for(reason):
    with pytest.raises(genlm.BrokenPluginError) as caught:
        genlm.get_backend("toy")
    assert caught.value.plugin == "genlm-toy:toy"
    assert reason in caught.value.reason


def test_a_broken_plugin_is_listed_with_its_reason_beside_the_good_ones(reason):
    infos = {info.name: info for info in genlm.list_backends()}
    assert infos["toy"].status == "broken"
    assert reason in infos["toy"].reason
    assert infos["good"].status == infos["reference"].status == "ok"


def test_a_broken_plugin_does_not_disturb_the_choice_of_another(reason):
    assert genlm.get_backend().distribution == "genlm-good"


def test_strict_mode_raises_for_a_broken_plugin_in_the_list(reason, monkeypatch):
    monkeypatch.setenv("GENLM_STRICT", "1")
    with pytest.raises(genlm.BrokenPluginError):
        genlm.list_backends()
    assert genlm.get_backend("good").distribution == "genlm-good"


def test_a_broken_plugin_tells_its_cause(core):
    core.install("genlm-toy", "toy", body="1 / 0")
    for _ in range(2):
        with pytest.raises(genlm.BrokenPluginError) as caught:
            genlm.get_backend("toy")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_entry_point_to_no_module_is_a_broken_plugin(core):
    core.metadata("genlm-gone", {"gone": "genlm_gone.plugin", "odd": "not a module"})
    assert {info.name: info.status for info in genlm.list_backends()} == {
        "gone": "broken",
        "odd": "broken",
        "reference": "ok",
    }


def test_strict_mode_raises_for_another_plugin_interface(core, monkeypatch):
    core.install("genlm-old", "old", extra="api=0")
    assert [i.status for i in genlm.list_backends() if i.name == "old"] == ["incompatible"]
    monkeypatch.setenv("GENLM_STRICT", "1")
    with pytest.raises(genlm.PluginApiError):
        genlm.list_backends()


def test_strict_mode_is_off_for_zero_and_empty(core, monkeypatch):
    core.install("genlm-toy", "toy", body="1 / 0")
    for value in ("", "0", "false"):
        monkeypatch.setenv("GENLM_STRICT", value)
        assert len(genlm.list_backends()) == 2


def test_a_spec_without_an_entry_point_is_listed_with_the_way_to_declare_it(core):
    core.install(
        "genlm-two",
        "one",
        body="""
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("one", "engine", "json:dumps")
            yield BackendSpec("two", "trie", "json:dumps")
        """,
    )
    two = {info.name: info for info in genlm.list_backends()}["two"]
    assert (two.status, two.kind, two.provider) == ("broken", "trie", "genlm-two:two")
    assert "no entry point is named 'two': add two = " in two.reason
    assert "install it again" in two.reason
    with pytest.raises(genlm.UnknownBackendError, match="no entry point is named 'two'"):
        genlm.get_trie("two")


def test_a_repaired_plugin_is_read_again_after_refresh(core):
    module = core.install("genlm-toy", "toy", body="1 / 0")
    with pytest.raises(genlm.BrokenPluginError):
        genlm.get_backend("toy")
    core.write(
        module,
        """
        import genlm

        @genlm.hookimpl
        def genlm_backends():
            yield genlm.BackendSpec("toy", "engine", "json:dumps")
        """,
    )
    genlm.refresh()
    assert callable(genlm.get_backend("toy"))
    assert module in sys.modules


def test_a_spec_without_an_entry_point_is_listed_in_the_order_of_names(core):
    body = """
        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("one", "engine", "json:dumps")
            yield BackendSpec("a", "trie", "json:dumps")
        """
    core.install("genlm-one", "one", body=body)
    assert [info.name for info in genlm.list_backends()] == ["a", "one", "reference"]
