"""The site is built from this repository alone, without warnings, and has every page."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import griffe
import pytest
from documents import REPOSITORY
from programs import run_code, run_program

import genlm

PAGES = ["README.md", "core/README.md", "docs/**/*.md", "plugins/*/README.md"]
ENGINES = {
    "hf": ("plugins/genlm-hf/src", "genlm_hf.engine.HFEngine"),
    "vllm": ("plugins/genlm-vllm/src", "genlm_vllm.engine.VLLMEngine"),
    "sgl": ("plugins/genlm-sgl/src", "genlm_sgl.engine.SGLEngine"),
    "mlx": ("plugins/genlm-mlx/src", "genlm_mlx.engine.MLXEngine"),
    "llamacpp": ("plugins/genlm-llamacpp/src", "genlm_llamacpp.engine.LlamaCppEngine"),
    "ray": ("plugins/genlm-ray/src", "genlm_ray.engine.RayEngine"),
    "reference": ("core/src", "genlm.core.reference.engine.ReferenceEngine"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder]
    # Whatever asks for another host fails.
    alone = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    environment = os.environ | alone | {"NO_MKDOCS_2_WARNING": "1"}
    done = run_program(*command, cwd=REPOSITORY, env=environment)
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, str]:
    """The text of each page of the site by its place."""
    found = set(site.rglob("*.html")) - {site / "404.html"}
    return {str(path.relative_to(site).parent): path.read_text("utf-8") for path in found}


def test_every_page_of_the_repository_is_in_the_site(site):
    for pattern in PAGES:
        for page in REPOSITORY.glob(pattern):
            place = page.relative_to(REPOSITORY).with_suffix("")
            folder = place.parent if place.name == "README" else place
            assert (site / folder / "index.html").exists(), place


def test_links_and_anchors_lead_somewhere(site, pages):
    """Also those that mkdocs does not check: in signatures and in the navigation."""
    for place, text in pages.items():
        for link in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (site / place / path).resolve() if path else site / place
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), (place, link)
            if anchor and target.suffix == ".html":
                assert f'id="{html.unescape(anchor)}"' in target.read_text("utf-8"), (
                    place,
                    link,
                )


def test_pages_load_nothing_from_other_hosts(pages):
    loaded = re.compile(
        r'<(?:script|img)[^>]*src="(https?:[^"]+)"|rel="stylesheet" href="(https?:)'
    )
    for place, text in pages.items():
        assert not loaded.search(text), place


def test_markdown_is_rendered_as_on_github(pages):
    """Lists and tables that Python-Markdown would take for paragraphs."""
    for place, text in pages.items():
        assert ":::" not in text, place
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.DOTALL):
            assert not re.search(r"\n\s*([-*]|\d+\.) |^\s*\|", paragraph), (place, paragraph)


@pytest.mark.parametrize("name", ENGINES)
def test_the_reference_has_every_option_of_every_engine(pages, name):
    folder, path = ENGINES[name]
    package, _, rest = path.partition(".")
    found = griffe.load(package, search_paths=[REPOSITORY / folder], allow_inspection=False)
    options = [each.name for each in found[rest].parameters if each.name != "self"]
    documented = re.findall(r"<code>(\w+)</code>\s*</td>", pages[f"reference/{name}"])
    assert set(options) <= set(documented)
    assert len(options) >= 2
    if name != "reference":
        readme = (REPOSITORY / folder).with_name("README.md").read_text("utf-8")
        assert [option for option in options if f"`{option}`" not in readme] in ([], ["model"])


@pytest.fixture(scope="module")
def documented(pages) -> set[str]:
    """Paths of what the reference documents under a heading or in a table of attributes."""
    text = "".join(page for place, page in pages.items() if place.startswith("reference/"))
    headings = re.findall(r'<h[2-6] id="([\w.]+)"', text)
    return {*headings, *re.findall(r'<td><code><span title="([\w.]+)"', text)}


EXPORTED = [
    *("genlm", "genlm.constraints", "genlm.plugin", "genlm.prefix", "genlm.smc"),
    "genlm.testing",
]
HOMES = [*EXPORTED, "genlm.core.base.errors", "genlm.core.base.statistics"]
"""Modules under whose names the reference documents classes."""


@pytest.mark.parametrize("module", EXPORTED)
def test_the_reference_has_every_public_name(documented, module):
    names = {name for name in import_module(module).__all__ if not name.startswith("__")}
    assert names
    elsewhere = {path.rpartition(".")[2] for path in documented if _is_public(path)}
    assert names - elsewhere == set()


def _is_public(path: str) -> bool:
    """Whether a path is that of a name in a public module, not of a member of a class."""
    return path.rpartition(".")[0] in HOMES


@pytest.mark.parametrize("module", ["genlm", "genlm.plugin"])
def test_the_reference_has_every_public_member_of_every_public_class(documented, module):
    missing = []
    for name in import_module(module).__all__:
        found = getattr(import_module(module), name)
        if isinstance(found, type) and not issubclass(found, BaseException):
            homes = {f"{home}.{each.__name__}" for each in found.__mro__ for home in HOMES}
            written = {path for path in documented if path.rpartition(".")[0] in homes}
            members = {path.rpartition(".")[2] for path in written}
            missing += [f"{name}.{each}" for each in _public_members(found) - members]
    assert missing == []


def _public_members(found: type) -> set[str]:
    """Members that genlm defines, inherited ones among them, and fields of instances."""
    ours = [base for base in found.__mro__ if base.__module__.startswith("genlm")]
    defined = {name for base in ours for name in {*vars(base), *_annotations(base)}}
    if found is genlm.AsyncLM:
        with genlm.load_model("demo", "reference") as llm:
            defined |= {*vars(llm)}
    return {name for name in defined if not name.startswith("_")}


def _annotations(found: type) -> dict[str, object]:
    return vars(found).get("__annotations__", {})


def test_a_new_public_name_is_documented_without_a_change_of_the_hook(monkeypatch):
    path = REPOSITORY / "scripts" / "site_pages.py"
    spec = importlib.util.spec_from_file_location("site_pages", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(genlm, "__all__", [*genlm.__all__, "Novelty"])
    assert "::: genlm.Novelty" in script._reference()["more"]


def test_the_pages_are_written_without_torch():
    """`make site` has an environment of its own, with the site's requirements alone."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'numpy', 'pluggy', 'rich']);"
        "sys.path.insert(0, 'scripts'); import site_pages; print(len(site_pages._reference()))"
    )
    assert int(run_code(code, cwd=REPOSITORY).stdout) > 15


def test_the_site_has_the_commands_and_leads_to_the_repository(pages):
    assert "genlm score" in pages["docs/commands"]
    for place, text in pages.items():
        assert '<a href="https://github.com/genlm/genlm" title="Go to repository"' in text, (
            place
        )
        assert "docs/commands/" in text.replace('href="./"', 'href="docs/commands/"'), place


BROWSER = next(filter(shutil.which, ["chromium", "chromium-browser", "google-chrome"]), None)
MEASURE = """<script>
addEventListener("load", () => {
  const blocks = [...document.querySelectorAll("pre > code")]
  const cut = blocks.filter((block) => block.scrollWidth > block.clientWidth)
  document.body.innerHTML = `<b id="cut">${cut.length} of ${blocks.length}</b>`
})
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize(
    "place", [".", "docs/guide", "docs/tutorials/steering", "reference/hf"]
)
def test_no_block_of_code_is_cut_in_a_window_of_1300_pixels(site, tmp_path, place):
    page = site / place / "measured.html"
    text = (site / place / "index.html").read_text("utf-8")
    page.write_text(text.replace("</body>", MEASURE), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command = [BROWSER, *options, "--window-size=1300,2000", "--dump-dom", page.as_uri()]
    [(cut, blocks)] = re.findall(r'id="cut">(\d+) of (\d+)<', run_program(*command).stdout)
    page.unlink()
    assert int(cut) == 0
    assert int(blocks) > 0
