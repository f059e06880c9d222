"""Collects the pages of the site: a hook of mkdocs.

Markdown pages keep their places in the repository, so that relative links between them need no
change. Links to other files become links to the repository's host. A link to an example that
stands alone in a line becomes its source. The pages of the other examples show their sources,
those of the notebooks their cells and stored outputs; the pages of the API
reference hold instructions for mkdocstrings, which reads docstrings and signatures from the
sources.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
CORE = REPOSITORY / "core" / "src"
HOST = "https://github.com/genlm/genlm"
PAGES = (
    *("*.md", "core/README.md", "docs/**/*.md"),
    *("plugins/*/README.md", "plugins/genlm-hf/src/genlm_hf/demo/MODEL.md"),
)
ASSETS = "docs/**/*.svg", "docs/assets/site.css"
EXAMPLES = "examples/*.py"
PROGRAMS = "docs/programs"
"""Has a page for some of the examples, by their names."""

NOTEBOOKS = ("docs/tutorials/first-steps.ipynb", "docs/tutorials/steering.ipynb")
"""In the order in which they are to be read."""

REFERENCE = {
    "models": (
        "Models and contexts",
        ["genlm.load_model", "genlm.AsyncLM", "genlm.Context", "genlm.Capability"],
    ),
    "results": (
        "Masks, reductions and results",
        [
            *("genlm.Mask", "genlm.DrawnToken", "genlm.TopTokens", "genlm.TokenScores"),
            "genlm.Reduction",
        ],
    ),
    "caches": (
        "Caches and statistics",
        [
            *("genlm.OutputCache", "genlm.Statistics"),
            "genlm.core.base.statistics.SchedulerStatistics",  # whose fields those have, too
        ],
    ),
    "vocabulary": (
        "Vocabularies and bytes",
        ["genlm.Token", "genlm.plugin.Vocabulary", "genlm.decode_vocab", "genlm.ByteReader"],
    ),
    "smc": ("Particle filters", ["genlm.smc"]),
    "constraints": ("Constraints", ["genlm.constraints"]),
    "tries": (
        "Token tries",
        ["genlm.get_trie", "genlm.TokenCharacterTrie", "genlm.AsyncTokenCharacterTrie"],
    ),
    "more": ("Other names", []),
    "hf": ("Options of hf", ["genlm_hf.engine.HFEngine"]),
    "vllm": ("Options of vllm", ["genlm_vllm.engine.VLLMEngine"]),
    "sgl": ("Options of sgl", ["genlm_sgl.engine.SGLEngine"]),
    "mlx": ("Options of mlx", ["genlm_mlx.engine.MLXEngine"]),
    "llamacpp": ("Options of llamacpp", ["genlm_llamacpp.engine.LlamaCppEngine"]),
    "ray": ("Options of ray", ["genlm_ray.engine.RayEngine"]),
    "reference": ("Options of reference", ["genlm.core.reference.engine.ReferenceEngine"]),
    "cuda": ("Options of cuda", ["genlm_trie_cuda.trie.DeviceTrie"]),
    "choosing": ("Choosing a backend", ["genlm.use_backend", "genlm.list_backends"]),
    "errors": ("Errors", ["genlm.core.base.errors", "genlm.UnverifiedModelWarning"]),
    "plugin": (
        "For plugin authors",
        [
            *("genlm.plugin.BackendSpec", "genlm.plugin.hookimpl", "genlm.plugin.BatchEngine"),
            *("genlm.plugin.Engine", "genlm.plugin.LoraEngine"),
            *("genlm.plugin.PrefixCacheEngine", "genlm.plugin.Query"),
            *("genlm.plugin.TokenSequence", "genlm.plugin.Completion"),
            "genlm.plugin.rows_from_logits",
        ],
    ),
    "prefix": ("Shared prefixes", ["genlm.prefix"]),
    "testing": (
        "The conformance suite",
        [
            *("genlm.testing.EngineTarget", "genlm.testing.TrieTarget"),
            *("genlm.testing.conformance_tests", "genlm.testing.TinyModel"),
            *("genlm.testing.families", "genlm.testing.measure_family"),
        ],
    ),
}
"""Pages of the API reference: file name, title, and what each documents first."""

EXPORTS = {
    "genlm": "more",
    "genlm.constraints": "constraints",
    "genlm.plugin": "plugin",
    "genlm.prefix": "prefix",
    "genlm.smc": "smc",
    "genlm.testing": "testing",
}
"""Modules whose `__all__` is documented: public names that REFERENCE does not place come to the
end of this page, so that a new name is documented as soon as it is exported."""

NOTES = {
    "models": "A method whose name ends in `_sync` does what the method without that ending "
    "does, and waits for the result; it needs no event loop.",
}
"""What a page of the API reference says before the objects."""

_UNDESCRIBED = {"show_if_no_docstring": True}

OPTIONS = {
    # Its attributes are set in `__init__`, and its bases are private.
    "genlm.AsyncLM": _UNDESCRIBED | {"show_bases": False, "summary": True},
    "genlm.Context": _UNDESCRIBED | {"summary": True},
    "genlm.Mask": _UNDESCRIBED,
    "genlm.TokenCharacterTrie": _UNDESCRIBED,
    "genlm.plugin.BackendInfo": _UNDESCRIBED,  # it inherits fields of BackendSpec
}
"""Options of mkdocstrings for one object."""

_log = logging.getLogger("mkdocs.hooks.site_pages")  # strict builds fail on its warnings

# READMEs of distributions have absolute links, because package indexes show them.
ABSOLUTE = re.compile(rf"\]\({HOST}/(?:blob|tree)/main/([^)\s#]+)")
SOURCE = re.compile(r"^\[\w+\.py\]\(../../examples/(\w+\.py)\)$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Fill in the parts of the navigation that follow from files."""
    lists = {
        "TUTORIALS": [_page_of(place) for place in (*NOTEBOOKS, *_other_examples())],
        "PROGRAMS": [f"{PROGRAMS}/README.md", *_under(f"{PROGRAMS}/[a-z]*.md")],
        "REFERENCE": ["docs/commands.md", *(f"reference/{name}.md" for name in _reference())],
        "DECISIONS": ["docs/decisions/README.md", *_under("docs/decisions/0*.md")],
    }
    for entry in config["nav"]:
        [(title, place)] = entry.items()
        if isinstance(place, str) and place in lists:
            entry[title] = lists[place]
    config["markdown_extensions"].append(_Lists())
    return config


class _Lists(Extension):
    """Lists that follow a paragraph without an empty line, in pages and docstrings."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - named by Markdown
        md.preprocessors.register(_SeparateLists(md), "separate_lists", 0)  # after code blocks


class _SeparateLists(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        begun = r"^((?![-*|] |\d+\. )\S.*\n)(?=[-*] )"
        return re.sub(begun, r"\1\n", "\n".join(lines), flags=re.MULTILINE).split("\n")


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of docs/ by the pages under their places in the repository."""
    found = [file for file in files if file.inclusion.is_excluded() or not _in_docs(file)]
    kept = Files(found)
    for pattern in (*PAGES, *ASSETS):
        for place in _under(pattern):
            path = str(REPOSITORY / place)
            kept.append(File.generated(config, place, abs_src_path=path))
    for place in _other_examples():
        text = (REPOSITORY / place).read_text("utf-8")
        page = f"# {place}\n\n[In the repository]({place.partition('/')[2]})\n\n"
        page += f"```python\n{text}```\n"
        kept.append(File.generated(config, _page_of(place), content=page))
    for place in NOTEBOOKS:
        page = "\n\n".join(_cells(json.loads((REPOSITORY / place).read_text("utf-8"))))
        kept.append(File.generated(config, _page_of(place), content=page))
    for name, page in _reference().items():
        kept.append(File.generated(config, f"reference/{name}.md", content=page))
    return kept


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Point links at pages; what is not one is in the repository."""
    place_of_page = page.file.src_uri
    folder = posixpath.dirname(place_of_page)

    def relative(match: re.Match[str]) -> str:
        return f"]({posixpath.relpath(match[1], folder or '.')}"

    def pointed(match: re.Match[str]) -> str:
        before, link, anchor, after = match.groups(default="")
        place = posixpath.normpath(posixpath.join(folder, link))
        is_folder = (REPOSITORY / place).is_dir()
        target = f"{place}/README.md" if is_folder else place
        if _page_of(place) != place_of_page:  # which links to its source
            target = _page_of(target)
        if files.get_file_from_path(target) is None:
            if not (REPOSITORY / place).exists():
                _log.warning("%s points at %s, which does not exist", place_of_page, place)
            kind = "tree" if is_folder else "blob"
            return f"{before}{HOST}/{kind}/main/{place}{anchor}{after}"
        return f"{before}{posixpath.relpath(target, folder or '.')}{anchor}{after}"

    parts = SOURCE.split(markdown)  # every second one is the name of an example
    parts[::2] = [LINK.sub(pointed, ABSOLUTE.sub(relative, part)) for part in parts[::2]]
    parts[1::2] = [_source(name) for name in parts[1::2]]
    return "\n".join(_nested("".join(parts).splitlines()))


def _source(name: str) -> str:
    """Return a program of examples/ as a block of code."""
    text = (REPOSITORY / "examples" / name).read_text("utf-8")
    return f"```python\n{text}```"


def _nested(lines: Iterable[str]) -> Iterator[str]:
    """Indent what belongs to a numbered item by four spaces, as Python-Markdown wants it."""
    in_code = False
    for line in lines:
        in_code ^= line.startswith("```")
        spaces = len(line) - len(line.lstrip())
        yield f" {line}" if not in_code and spaces % 4 == 3 else line


@functools.cache
def _reference() -> dict[str, str]:
    """The Markdown of each page of the API reference that has anything to document."""
    objects = {page: list(listed) for page, (_, listed) in REFERENCE.items()}
    listed = {each for page in objects.values() for each in page}
    listed |= {f"genlm.{name}" for name in _core()["core.base.errors"].members}
    names = {each.rpartition(".")[2] for each in listed}
    for module, page in EXPORTS.items():
        new = [name for name in _exports(module) if name not in names]
        objects[page] += [f"{module}.{name}" for name in new if not name.startswith("__")]
        names.update(new)
    return {
        page: f"# {title}\n\n{NOTES.get(page, '')}\n\n"
        + "\n\n".join(map(_block, objects[page]))
        for page, (title, _) in REFERENCE.items()
        if objects[page]
    }


def _exports(module: str) -> list[str]:
    """Return a module's `__all__`; only modules that derive theirs are run."""
    place = module.partition(".")[2]
    found = _core()[place] if place else _core()
    if written := [str(name) for name in found.exports or ()]:
        return written
    sys.path.insert(0, str(CORE))
    return list(import_module(module).__all__)


@functools.cache
def _core() -> Any:
    """The sources of the package `genlm`, which griffe reads whole."""
    return griffe.load("genlm", search_paths=[CORE], allow_inspection=False)


def _block(path: str) -> str:
    """What tells mkdocstrings to document an object."""
    options = OPTIONS.get(path)
    return f"::: {path}" + (f"\n    options: {json.dumps(options)}" if options else "")


def _under(pattern: str) -> list[str]:
    """Files of the repository, as paths relative to it; not those of environments."""
    found = sorted(REPOSITORY.glob(pattern))
    return [path.relative_to(REPOSITORY).as_posix() for path in found]


def _other_examples() -> list[str]:
    """Programs of examples/ that have no page in docs/programs/."""
    return [place for place in _under(EXAMPLES) if not _page_of(place).startswith(PROGRAMS)]


def _in_docs(file: File) -> bool:
    source = file.abs_src_path
    return source is not None and Path(source).is_relative_to(REPOSITORY / "docs")


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown, each followed by its outputs."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                yield f"```text\n{''.join(output['text'])}```"
            else:
                svg = "".join(output["data"]["image/svg+xml"]).encode()
                picture = base64.b64encode(svg).decode()
                yield f'<img alt="plot" src="data:image/svg+xml;base64,{picture}">'


def _page_of(place: str) -> str:
    """The page that shows a program of examples/ or a notebook; other places are unchanged."""
    if place.startswith("examples/") and place.endswith(".py"):
        page = f"{PROGRAMS}/{Path(place).stem}.md"
        return page if (REPOSITORY / page).exists() else f"{place.removesuffix('.py')}.md"
    return f"{place.removesuffix('.ipynb')}.md" if place.endswith(".ipynb") else place
