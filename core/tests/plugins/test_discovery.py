"""What counts as installed, and how often it is looked for."""

import os
import sys
import threading

import pytest

import genlm
from genlm.core.plugins import lookup
from genlm.core.plugins.registry import find_plugins


def ids():
    return [plugin.id for plugin in find_plugins()]


def test_plugins_are_found_without_importing_them(core):
    core.install("genlm-toy", "toy", body="1 / 0")
    assert ids() == ["genlm-core:reference", "genlm-toy:toy"]
    assert "genlm_toy_plugin" not in sys.modules


def test_a_distribution_seen_twice_is_one_provider(core, tmp_path, monkeypatch):
    core.install("genlm-toy", "toy")
    leftover = type(core)(tmp_path / "leftover")
    leftover.metadata("Genlm.Toy", {"toy": "genlm_toy_plugin"}, version="0.9")
    monkeypatch.setattr(sys, "path", [*sys.path, str(leftover.folder), str(core.folder)])
    genlm.refresh()
    assert [(p.id, p.version) for p in find_plugins()] == [
        ("genlm-core:reference", "1.0"),
        ("genlm-toy:toy", "1.0"),
    ]
    assert genlm.get_backend("toy").distribution == "genlm-toy"


def test_a_leftover_entry_point_of_a_shadowed_distribution_does_not_count(
    core, tmp_path, monkeypatch
):
    newer = core.metadata("genlm-toy", {}, version="2.0")
    (newer / "entry_points.txt").unlink()
    leftover = type(core)(tmp_path / "leftover")
    leftover.metadata("genlm-toy", {"toy": "genlm_toy_plugin"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(leftover.folder)])
    assert ids() == ["genlm-core:reference"]


def test_the_metadata_folder_of_an_old_setuptools_counts(core):
    folder = core.folder / "genlm_toy.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: genlm-toy\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[genlm]\ntoy = genlm_toy_plugin\n")
    assert "genlm-toy:toy" in ids()


def test_metadata_that_cannot_be_read_is_logged_and_left_out(core, caplog):
    folder = core.metadata("genlm-toy", {"toy": "genlm_toy_plugin"})
    (folder / "METADATA").unlink()
    nameless = core.metadata("genlm-other", {"other": "genlm_other"})
    (nameless / "METADATA").write_text("Metadata-Version: 2.1\n")
    assert ids() == ["genlm-core:reference"]
    assert caplog.text.count("cannot read the metadata") == 2


def test_other_groups_and_other_distributions_are_not_plugins(core):
    folder = core.metadata("genlm-toy", {})
    (folder / "entry_points.txt").write_text("[console_scripts]\ntoy = genlm_toy:main\n")
    assert ids() == ["genlm-core:reference"]


def test_the_environment_is_scanned_once_until_refresh(core, monkeypatch):
    scans = []

    def counted():
        scans.append(1)
        return find_plugins()

    monkeypatch.setattr(lookup, "find_plugins", counted)
    core.install("genlm-toy", "toy")
    genlm.get_backend("toy")
    genlm.get_backend("toy")
    genlm.list_backends()
    assert len(scans) == 1
    genlm.refresh()
    assert len(scans) == 1
    genlm.get_backend("toy")
    assert len(scans) == 2


def test_a_hook_is_called_once_until_refresh(core):
    body = """
        calls = []

        @genlm.hookimpl
        def genlm_backends():
            calls.append(1)
            yield BackendSpec("toy", "engine", "json:dumps")
        """
    module = core.install("genlm-toy", "toy", body=body)
    genlm.get_backend("toy")
    genlm.get_backend("toy")
    genlm.list_backends()
    assert len(sys.modules[module].calls) == 1


def test_an_installation_in_the_running_process_is_seen_after_refresh(core):
    module = core.install("genlm-a", "a")
    assert genlm.get_backend().distribution == "genlm-a"
    status = core.folder.stat()
    source = (core.folder / f"{module}.py").read_text().replace("'a'", "'b'")
    (core.folder / "genlm_b_plugin.py").write_text(source)
    folder = core.folder / "genlm_b-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: genlm-b\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[genlm]\nb = genlm_b_plugin\n")
    # Import caches go by the folder's time, which a coarse clock may leave as it was.
    os.utime(core.folder, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(genlm.UnknownBackendError):
        genlm.get_backend("b")
    genlm.refresh()
    assert callable(genlm.get_backend("b"))


def test_a_removed_plugin_is_gone_after_refresh(core):
    core.install("genlm-toy", "toy")
    genlm.get_backend("toy")
    (core.folder / "genlm_toy-1.0.dist-info" / "entry_points.txt").unlink()
    genlm.refresh()
    with pytest.raises(genlm.UnknownBackendError):
        genlm.get_backend("toy")


def test_many_threads_get_the_same_target(core):
    core.install("genlm-toy", "toy")
    barrier = threading.Barrier(8, timeout=120)
    backends = []

    def ask():
        barrier.wait()
        backends.append(genlm.get_backend("toy"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(backends) == 8
    assert len(set(backends)) == 1


def test_a_plugin_that_waits_for_another_threads_lookup_does_not_deadlock(core):
    core.install("genlm-a", "a")
    body = """
        import threading
        inner = threading.Thread(target=lambda: genlm.get_backend("a"))
        inner.start()
        inner.join(timeout=120)
        alive = inner.is_alive()

        @genlm.hookimpl
        def genlm_backends():
            yield BackendSpec("b", "engine", "json:dumps")
        """
    module = core.install("genlm-b", "b", body=body)
    assert callable(genlm.get_backend("b"))
    assert not sys.modules[module].alive
