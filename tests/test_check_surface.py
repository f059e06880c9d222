"""`make surface` finds what breaks programs, and nothing else."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import griffe
import pytest
from documents import REPOSITORY

script = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "scripts" / "check_surface.py")))
PACKAGES = {"src": ("shop", "shop.extra")}
FILES = {
    "core/pyproject.toml": '[project]\nversion = "1.1.0"\n',
    "src/shop/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from shop.inner import Till as Till
    from shop.inner import pay as pay
""",
    "src/shop/inner.py": """
class Till:
    def __init__(self, size=1, *, owner=None): ...
    def open(self): ...
def pay(amount, tip=0): ...
def internal(x): ...
""",
    "src/shop/extra.py": "__all__ = ['more']\ndef more(a): ...\ndef less(a): ...\n",
}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def shop(tmp_path) -> Path:
    """A repository whose first commit is tagged v1.0.0."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1.0.0")
    return tmp_path


def change(shop: Path, file: str, before: str, after: str) -> list[str]:
    path = shop / "src" / "shop" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return script.breakages(shop, "v1.0.0", PACKAGES)


def test_nothing_changed_is_nothing_broken(shop):
    assert script.breakages(shop, "v1.0.0", PACKAGES) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        ("__init__.py", "    from shop.inner import pay as pay\n", "", "pay"),
        ("inner.py", "def open(self)", "def shut(self)", "Till.open"),
        ("inner.py", "tip=0", "*, tip=0", "tip"),
        ("inner.py", "owner=None", "owner=0", "owner"),
        ("inner.py", "amount, ", "amount, currency, ", "currency"),
        ("extra.py", "def more", "def most", "more"),
    ],
)
def test_a_change_that_breaks_programs_is_named(shop, file, before, after, named):
    found = change(shop, file, before, after)
    assert named in " ".join(found)
    assert "\x1b" not in " ".join(found)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("inner.py", "def internal(x)", "def other(x)"),
        ("inner.py", "tip=0", "tip=0, note=''"),
        ("extra.py", "def less(a): ...\n", ""),
    ],
)
def test_a_change_that_breaks_none_is_not(shop, file, before, after):
    assert change(shop, file, before, after) == []


def test_a_package_that_the_release_did_not_have_breaks_nothing(shop):
    (shop / "new" / "store").mkdir(parents=True)
    (shop / "new" / "store" / "__init__.py").write_text("def pay(): ...\n")
    assert script.breakages(shop, "v1.0.0", {"new": ("store",)}) == []


def test_the_last_release_is_a_tag_or_none(shop):
    assert script.last_release(shop) == "v1.0.0"
    git(shop, "tag", "v1.1.0")
    assert script.last_release(shop, new="v1.1.0") == "v1.0.0"
    git(shop, "tag", "-d", "v1.1.0")
    assert script.version(shop) == "1.1.0"
    git(shop, "tag", "-d", "v1.0.0")
    assert script.last_release(shop) is None


def exit_of(shop: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in {"REPOSITORY": shop, "PACKAGES": PACKAGES}.items():
        monkeypatch.setitem(script.main.__globals__, name, value)
    return script.main()


def test_breaking_changes_need_another_major_version(shop, monkeypatch, capsys):
    assert exit_of(shop, monkeypatch) == 0
    change(shop, "inner.py", "tip=0", "*, tip=0")
    assert exit_of(shop, monkeypatch) == 1
    assert (
        capsys.readouterr().out.splitlines()[1].startswith("1 breaking changes between v1.0.0")
    )
    (shop / "core" / "pyproject.toml").write_text('[project]\nversion = "2.0.0"\n')
    assert exit_of(shop, monkeypatch) == 0


def test_before_the_first_release_there_is_nothing_to_compare(shop, monkeypatch, capsys):
    git(shop, "tag", "-d", "v1.0.0")
    assert exit_of(shop, monkeypatch) == 0
    assert capsys.readouterr().out.startswith("no release yet")


@pytest.mark.parametrize(("folder", "modules"), script.PACKAGES.items())
def test_the_public_modules_of_this_repository_have_public_names(folder, modules):
    found = script.surface(REPOSITORY, None, folder, modules)
    for path in modules:
        inner = path.partition(".")[2]
        module = found[inner] if inner else found
        assert isinstance(module, griffe.Module)
        names = {name for name, member in module.members.items() if member.is_public}
        assert names - set(module.modules), path
    if folder == "core/src":
        assert found["load_model"].is_public
        assert not found["core"].is_public
        assert found["plugin.BatchEngine"].is_public
