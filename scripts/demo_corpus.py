"""English prose from the files of the running Python: the demo model's corpus.

Every CPython carries a few megabytes of English: the language reference
(`pydoc_data.topics`), the docstrings and block comments of the standard
library, the comments of the C headers, and IDLE's news. This module turns them
into documents of plain prose, without downloads or randomness: a
Python version determines the corpus, which is identified by its sha256.

A *document* is one docstring, one comment or one text. Its paragraphs are
unwrapped to one line each and joined by a newline; code, tables and markup go.
A *source* is the file or topic of a document. The split is by source, so
no file is on both sides, and copies are removed first: a paragraph
occurs once in the corpus, and a held-out paragraph that shares a run of
`SHINGLE_WORDS` words with the training text is dropped.

The module is independent of tokens and models.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 5
SHINGLE_WORDS = 8

SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})
TEXT_FILES = (
    "LICENSE.txt",
    "email/architecture.rst",
    "idlelib/HISTORY.txt",
    "idlelib/NEWS.txt",
    "idlelib/News3.txt",
    "idlelib/NEWS2x.txt",
    "idlelib/README.txt",
    "idlelib/TODO.txt",
    "idlelib/extend.txt",
)
_FUNCTION_WORDS = (
    "a an and are as at be been but by can for from has have if in is it its may must no not "
    "of on or that the their then there these they this to was were when which will with you"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
_ROLE = re.compile(r":[a-zA-Z:+-]+:`~?([^`<]*?)(?: *<[^>]*>)?`")
_QUOTED = re.compile(r"``?([^`']{1,60}?)(?:``?|'')")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(\w[\w ,'-]{0,60}?)\1(?![\w*])")
_BULLET = re.compile(r"^\s*(?:[-*+o•]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+(?=\S)")
_CODE_START = re.compile(
    r"^\s*(>>>|XXX|TODO|FIXME|\.\.\.|\.\. |\$ |#!|@|%|\|)|^(\w+: )?https?:|::=|\$Id"
)
_BLANK = re.compile(r"\n[ \t]*\n")
_CODE = re.compile(r"[{}\\|=<>^~@]{2}|\w\s?=\s?\S|;$|\w\[|\w\((?!\)|s\))|\.\.\.|-{3}|_{3}")
_PLAIN_WORD = re.compile(r"[\"'(]*[A-Za-z]+(?:['/-][A-Za-z]+)*(?:\(\))?[\"').,:;!?]*")
_PLAIN_MARKS = str.maketrans(
    dict(zip("\u2018\u2019\u201c\u201d\u2013\u2014\u00a0", "''\"\"-- "))
)
_END_MARKS = ".:!?)\"'"
_COMMENT_BLOCK = re.compile(r"^([ \t]*)#.*\n(?:\1#.*\n)*", re.MULTILINE)
_C_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")


@dataclass(frozen=True, slots=True)
class Document:
    """One document: `source` is the file or topic, `text` its paragraphs, one a line."""

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out documents without a shared source or paragraph."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Name both sides, document by document, in order."""
        digest = hashlib.sha256()
        for side in (self.training, self.held_out):
            for text in side:
                digest.update(text.encode() + b"\x00")
            digest.update(b"\x01")
        return digest.hexdigest()


def byte_count(documents: Iterable[str]) -> int:
    """Count the UTF-8 bytes of `documents`, without any end marks."""
    return sum(len(text.encode()) for text in documents)


def load_corpus() -> Corpus:
    """Read, clean, deduplicate and split the running Python's prose."""
    documents = _without_copies(_documents())
    training = [d.text for d in documents if not is_held_out(d.source)]
    seen = {run for text in training for run in _word_runs(text)}
    held_out = []
    for document in documents:
        if is_held_out(document.source):
            kept = [p for p in document.text.split("\n") if not (_word_runs(p) & seen)]
            if kept:
                held_out.append("\n".join(kept))
    return Corpus(tuple(training), tuple(held_out))


def excerpt(documents: Sequence[str], size: int = 10_000) -> str:
    """Choose documents by their hash up to `size` bytes, an empty line between two."""
    chosen: list[str] = []
    for text in sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest()):
        if byte_count(chosen) + len(text.encode()) <= size:
            chosen.append(text)
    return "\n\n".join(chosen) + "\n"


def is_held_out(source: str) -> bool:
    """Decide the side of a source by the hash of its name: stable across Python versions."""
    return int(hashlib.sha256(source.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def _word_runs(text: str) -> set[tuple[str, ...]]:
    """Return every run of `SHINGLE_WORDS` words; a shorter paragraph is one run."""
    runs = set()
    for paragraph in text.split("\n"):
        words = tuple(_WORD.findall(paragraph.lower()))
        last = max(1, len(words) - SHINGLE_WORDS + 1)
        runs.update(words[i : i + SHINGLE_WORDS] for i in range(last))
    return runs


def _without_copies(documents: Iterable[Document]) -> list[Document]:
    """Keep the first copy of each paragraph, comparing words only."""
    seen: set[tuple[str, ...]] = set()
    result = []
    for document in documents:
        kept = []
        for paragraph in document.text.split("\n"):
            words = tuple(_WORD.findall(paragraph.lower()))
            if words not in seen:
                seen.add(words)
                kept.append(paragraph)
        if kept:
            result.append(Document(document.source, "\n".join(kept)))
    return result


def _documents() -> Iterator[Document]:
    for source, raw in _raw_texts():
        paragraphs = list(prose_paragraphs(raw))
        if paragraphs:
            yield Document(source, "\n".join(paragraphs))


def _raw_texts() -> Iterator[tuple[str, str]]:
    """Yield (source, raw text) in a fixed order."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    for name, text in sorted(topics.items()):
        yield f"topic {name}", text
    for name in TEXT_FILES:
        if (library / name).is_file():
            yield name, (library / name).read_text("utf-8", "replace")
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and "_sysconfigdata" not in path.name:
            code = path.read_bytes()
            yield from ((relative.as_posix(), text) for text in _docstrings(code))
            yield from ((relative.as_posix(), text) for text in _comments(code))
    headers = Path(sysconfig.get_path("include"))
    for path in sorted(headers.rglob("*.h")):
        for match in _C_COMMENT.finditer(path.read_text("utf-8", "replace")):
            yield path.relative_to(headers).as_posix(), _strip_margin(match[1], "* ")


def _docstrings(code: bytes) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings
        try:
            tree = ast.parse(code)
        except (SyntaxError, ValueError):
            return
    nodes: deque[ast.AST] = deque([tree])
    while nodes:  # ast.walk would also enter every expression
        node = nodes.popleft()
        nodes.extend(
            child for child in ast.iter_child_nodes(node) if isinstance(child, _BLOCKS)
        )
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def _comments(code: bytes) -> Iterator[str]:
    """Yield blocks of whole-line comments that stand at one column on adjacent lines."""
    for block in _COMMENT_BLOCK.finditer(code.decode("utf-8", "replace")):
        yield "\n".join(line.strip().lstrip("#") for line in block[0].rstrip().split("\n"))


def _strip_margin(text: str, margin: str) -> str:
    return "\n".join(line.strip().lstrip(margin) for line in text.split("\n"))


def prose_paragraphs(raw: str) -> Iterator[str]:
    """Yield the paragraphs of `raw` that read like English, each unwrapped to one line."""
    for block in _BLANK.split(raw.expandtabs()):
        item: list[str] = []
        for line in block.split("\n"):
            if _BULLET.match(line) and item:
                yield from _prose("\n".join(item))
                item = []
            item.append(line)
        yield from _prose("\n".join(item))


def _prose(block: str) -> Iterator[str]:
    """Yield `block` unwrapped, or nothing when it is code, a table, or a heading."""
    lines = [line for line in _BULLET.sub("", block).split("\n") if re.search(r"\w", line)]
    if not lines or any(_CODE_START.search(line) for line in lines):
        return
    text = " ".join(" ".join(lines).translate(_PLAIN_MARKS).split())
    for pattern, group in ((_ROLE, r"\1"), (_QUOTED, r"\1"), (_EMPHASIS, r"\2")):
        text = pattern.sub(group, text)
    text = text.removesuffix("::").strip()
    if _reads_like_english(text):
        yield text[0].upper() + text[1:] + ("" if text[-1] in _END_MARKS else ".")


def _reads_like_english(text: str) -> bool:
    """Judge by words, function words, letters and the marks of program text."""
    words = text.split()
    function_words = sum(word.lower() in FUNCTION_WORDS for word in words)
    return (
        len(words) >= 5
        and text.isascii()
        and re.fullmatch(r"[A-Za-z]+(['-][A-Za-z]+)*,?", words[0]) is not None
        and (text[-1] in _END_MARKS or words[-1].isalpha())
        and words[-1].lower() not in FUNCTION_WORDS
        and sum(_PLAIN_WORD.fullmatch(word) is not None for word in words) >= 0.8 * len(words)
        and function_words >= 0.12 * len(words)
        and _CODE.search(text) is None
    )
