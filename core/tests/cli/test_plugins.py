"""`genlm plugins`, through the console script's own function in a fresh process."""

import json
import os

import pytest
from programs import run_code
from typer.testing import CliRunner

from genlm.cli import app
from genlm.core.plugins.registry import PUBLISHED

PLUGINS = {
    "broken": "raise OSError('no disk')",
    "missing": "requires=('no_such_module',), capabilities=('lora',)",
    "fine": "capabilities=('lora', 'score')",
}


@pytest.fixture
def environment(tmp_path):
    """Three plugins on `PYTHONPATH`, the installed ones disabled."""
    for name, text in PLUGINS.items():
        hook = (
            "import genlm\n"
            "@genlm.hookimpl\n"
            "def genlm_backends():\n"
            f"    yield genlm.BackendSpec({name!r}, 'engine', 'json:dumps', {text})\n"
        )
        (tmp_path / f"{name}_plugin.py").write_text(text if name == "broken" else hook)
        folder = tmp_path / f"their_{name}-2.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: their-{name}\nVersion: 2.1\n"
        )
        (folder / "entry_points.txt").write_text(f"[genlm]\n{name} = {name}_plugin\n")
    outer = {key: value for key, value in os.environ.items() if not key.startswith("GENLM_")}
    return outer | {
        "PYTHONPATH": str(tmp_path),
        "GENLM_PLUGINS": "their-broken,their-missing,their-fine",
    }


def run(environment, *arguments, code="from genlm.cli import main; main()", status=0):
    return run_code(code, *arguments, env=environment, status=status)


def test_the_json_list_has_every_field_of_every_backend(environment):
    result = run(environment, "plugins", "--json")
    assert result.stderr == ""
    infos = {info["provider"]: info for info in json.loads(result.stdout)}
    fine = infos["their-fine:fine"]
    assert fine["status"] == "ok"
    assert fine["kind"] == "engine"
    assert (fine["distribution"], fine["version"], fine["api"]) == ("their-fine", "2.1", 1)
    assert fine["capabilities"] == ["lora", "score"]
    assert infos["their-missing:missing"]["missing"] == ["no_such_module"]
    assert infos["their-missing:missing"]["install"] == "pip install their-missing"
    assert infos["their-broken:broken"]["reason"] == "OSError: no disk"
    assert infos["genlm-core:reference"]["status"] == "ok"


def test_the_table_has_one_unwrapped_line_per_backend(environment):
    result = run(environment, "plugins")
    assert result.stderr == ""
    heading, *rows = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert heading[0] == "name"
    rows = dict(rows)
    status = "missing: no_such_module; pip install their-missing"
    assert rows["missing"].split() == [
        "engine",
        "their-missing",
        "2.1",
        "1",
        "lora",
        *status.split(),
    ]
    assert rows["broken"].split() == [
        "?", "their-broken", "2.1", "?", "-", "broken:", "OSError:", "no", "disk",
    ]  # fmt: skip
    assert rows["fine"].split()[-1] == "ok"


def test_torch_and_targets_are_not_imported(environment):
    code = (
        "import sys; from genlm.cli import app; app(['plugins'], standalone_mode=False);"
        "assert 'fine_plugin' in sys.modules;"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    result = run(environment, code=code)
    assert result.stderr == ""


def test_an_error_of_genlms_own_is_one_line_and_exit_code_one(environment):
    result = run(environment, "demo", "--backend", "broken", status=1)
    assert result.stdout == ""
    assert (
        result.stderr == "genlm: the plugin their-broken:broken is broken: OSError: no disk\n"
    )


@pytest.mark.parametrize("command", [("plugins",), ("check", "broken")])
def test_in_strict_mode_the_traceback_of_the_cause_precedes_it(environment, command, tmp_path):
    result = run(environment | {"GENLM_STRICT": "1"}, *command, status=1)
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert f'File "{tmp_path}/broken_plugin.py", line 1, in <module>' in result.stderr
    assert result.stderr.endswith(
        "OSError: no disk\ngenlm: the plugin their-broken:broken is broken: OSError: no disk\n"
    )


def test_strict_mode_shows_why_the_module_of_an_engine_cannot_be_imported(
    environment, tmp_path
):
    source = (tmp_path / "fine_plugin.py").read_text().replace("json:dumps", "engine_of_it:E")
    (tmp_path / "fine_plugin.py").write_text(source)
    (tmp_path / "engine_of_it.py").write_text("\nraise OSError('no GPU')")
    code = "from genlm.cli import main; main()"
    arguments = ("demo", "--backend", "fine")
    result = run(environment | {"GENLM_STRICT": "1"}, *arguments, code=code, status=1)
    assert f'File "{tmp_path}/engine_of_it.py", line 2, in <module>' in result.stderr
    assert "is broken: importing 'engine_of_it:E' failed: OSError: no GPU" in result.stderr


def test_the_version_is_that_of_the_core(environment):
    from importlib.metadata import version

    result = run(environment, "--version")
    assert result.stdout == f"genlm {version('genlm-core')}\n"


def test_a_plugin_is_described_with_its_options_and_links(environment, tmp_path):
    source = (tmp_path / "fine_plugin.py").read_text().replace("json:dumps", "fine_engine:E")
    (tmp_path / "fine_plugin.py").write_text(source)
    (tmp_path / "fine_engine.py").write_text(
        "raise OSError('imported')\n"
        "class E:\n"
        '    """Serves.\n\n    Args:\n        speed: How fast it is.\n    """\n'
        "    def __init__(self, model, *, speed=3): pass\n"
    )
    metadata = tmp_path / "their_fine-2.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Project-URL: Documentation, https://a.b/c\n")
    lines = [line.split() for line in run(environment, "plugins", "fine").stdout.splitlines()]
    assert ["speed", "3", "How", "fast", "it", "is."] in lines
    assert ["documentation", "https://a.b/c"] in lines
    assert ["status", "ok"] in lines
    [described] = json.loads(run(environment, "plugins", "their-fine:fine", "--json").stdout)
    assert described["options"] == [
        {"name": "speed", "default": "3", "meaning": "How fast it is."}
    ]
    assert described["links"] == {"Documentation": "https://a.b/c"}
    assert described["capabilities"] == ["lora", "score"]


def test_a_plugin_whose_library_is_missing_is_described_too(environment):
    assert (
        "missing: no_such_module; pip install" in run(environment, "plugins", "missing").stdout
    )


def test_of_a_broken_plugin_only_what_is_known_is_said(environment):
    printed = run(environment, "plugins", "broken").stdout
    assert [line.split() for line in printed.splitlines()] == [
        ["broken"],
        ["status", "broken:", "OSError:", "no", "disk"],
        ["provided", "by", "their-broken", "2.1"],
        ["traceback", "GENLM_STRICT=1", "genlm", "plugins"],
    ]
    [described] = json.loads(run(environment, "plugins", "broken", "--json").stdout)
    assert described["options"] is None


def test_of_a_disabled_plugin_neither_options_nor_uses_are_listed(environment):
    disabled = environment | {"GENLM_DISABLE_PLUGINS": "their-fine"}
    printed = run(disabled, "plugins", "fine").stdout
    assert "disabled: GENLM_DISABLE_PLUGINS lists it" in printed
    assert "load" not in printed
    assert "option" not in printed


def test_a_name_that_two_distributions_provide_is_loaded_by_its_provider(environment, tmp_path):
    (tmp_path / "their_missing-2.1.dist-info/entry_points.txt").write_text(
        "[genlm]\nfine = fine_plugin\n"
    )
    both = environment | {"GENLM_PLUGINS": "their-fine,their-missing"}
    printed = run(both, "plugins", "fine").stdout
    assert "genlm.load_model(model, 'their-fine:fine', **options)" in printed
    assert "genlm.load_model(model, 'their-missing:fine', **options)" in printed


def test_an_unknown_plugin_is_answered_with_the_nearest(environment):
    result = run(environment, "plugins", "fin", status=1)
    assert "Did you mean 'fine'?" in result.stderr


def test_published_plugins_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setitem(PUBLISHED, "absent", ("engine", "genlm-absent"))
    result = CliRunner().invoke(app, ["plugins"])
    assert "\nnot installed: absent; `genlm plugins NAME` says how to get one" in result.stdout
