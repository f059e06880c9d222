"""The page of the commands has what `--help` prints."""

from __future__ import annotations

import importlib.util
import re

import pytest
from documents import REPOSITORY
from typer.testing import CliRunner

from genlm.cli import app

PAGE = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^## genlm ?(.*)$", PAGE, re.MULTILINE)


def help_of(*command: str) -> str:
    """The help of a command, without boxes and line breaks."""
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "1000"})
    assert done.exit_code == 0
    return re.sub(r"[^\w\s.,:;<>=()\[\]{}\"'`|-]", " ", done.stdout)


def section(command: str) -> str:
    heading = f"## genlm {command}".strip()
    return PAGE.partition(f"{heading}\n")[2].partition("\n## ")[0]


def test_the_page_is_up_to_date() -> None:
    path = REPOSITORY / "scripts" / "commands_page.py"
    spec = importlib.util.spec_from_file_location("commands_page", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.commands_page() == PAGE, "run python scripts/commands_page.py"


def test_every_command_that_help_lists_has_a_section() -> None:
    for name in COMMANDS:
        _, _, listed = help_of(*name.split()).partition(" Commands ")
        names = [line.split()[0] for line in listed.splitlines() if line.split()]
        assert {f"{name} {each}".strip() for each in names} <= {*COMMANDS}, name
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_help_prints_is_on_the_page(command: str) -> None:
    printed = {*re.findall(r"(?<!\S)--[a-z][a-z-]*", help_of(*command.split()))}
    documented = {*re.findall(r"(?<!\S)`?(--[a-z][a-z-]*)", section(command))}
    assert printed == documented
