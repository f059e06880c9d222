"""The site is built from this repository alone, without warnings, and has every page."""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path

import griffe
import pytest
from documents import REPOSITORY
from programs import run_program

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


def test_the_reference_has_the_names_that_users_import(pages):
    text = "".join(page for place, page in pages.items() if place.startswith("reference/"))
    for name in (
        "next_token_logprobs",
        "extend",
        "systematic_resampling",
        "ContextLengthError",
    ):
        assert f"{name}" in text
    models = pages["reference/models"]
    assert models.count('class="doc doc-object doc-function"') > 15
