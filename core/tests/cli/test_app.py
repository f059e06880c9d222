"""`genlm` as a command: help, completion, `python -m genlm`, Ctrl-C."""

from __future__ import annotations

import os
import sys

import pytest
from programs import run_code, run_program
from typer.testing import CliRunner

import genlm
from genlm.cli import app, main
from genlm.cli.arguments import backends

INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv[0] = "genlm"
from genlm.__main__ import main
main()
"""


@pytest.mark.parametrize("command", [(), ("check",), ("demo",), ("plugins",)])
def test_h_is_help(command: tuple[str, ...]) -> None:
    short = CliRunner().invoke(app, [*command, "-h"])
    long = CliRunner().invoke(app, [*command, "--help"])
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage" in short.output


def test_the_package_is_a_program() -> None:
    result = run_program(sys.executable, "-m", "genlm", "--version")
    assert result.stdout == f"genlm {genlm.__version__}\n"


@pytest.mark.parametrize("module", ["typer", "genlm.cli.app", "genlm.core.plugins"])
def test_ctrl_c_during_imports_leaves_no_traceback(module: str) -> None:
    result = run_code(INTERRUPTED.format(name=module), "plugins", status=130)
    assert result.stderr == "\ngenlm: interrupted\n"


def test_ctrl_c_while_a_command_imports_leaves_no_traceback() -> None:
    code = INTERRUPTED.format(name="torch")
    result = run_code(code, "demo", "--backend", "reference", status=None)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr


def test_an_error_of_the_system_is_printed_as_one_line(monkeypatch, capsys) -> None:
    def write_to_a_full_disk() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(main.__globals__, "app", write_to_a_full_disk)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == "genlm: [Errno 28] No space left on device\n"
    monkeypatch.setenv("GENLM_STRICT", "1")
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "in write_to_a_full_disk" in capsys.readouterr().err


def test_characters_that_the_output_cannot_encode_are_escaped() -> None:
    code = "from genlm.cli import main; main.__globals__['app'] = lambda: print('é'); main()"
    result = run_code(code, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert result.stdout == "\\xe9\n"


def test_shells_complete_the_names_of_backends() -> None:
    assert "reference" in backends("engine")("ref")
    assert backends("trie")("ref") == []
    help_page = CliRunner().invoke(app, ["--help"]).output
    assert "--install-completion" in help_page
