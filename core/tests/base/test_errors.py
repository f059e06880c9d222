"""Every error says what was asked, found and to be done, and survives copies and pickles."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest

from genlm.core.base import errors
from genlm.core.engine.engine import Capability

EXAMPLES: list[tuple[errors.GenlmError, dict[str, Any], list[str]]] = [
    (errors.EmptySequenceError(), {}, ["empty sequence", "at least one token id"]),
    (
        errors.ContextLengthError(9, 8),
        {"length": 9, "max_context": 8},
        ["9 tokens", "context of 8", "shorten it"],
    ),
    (
        errors.ContextLengthError(10, 8, is_text=True),
        {"length": 10, "max_context": 8, "is_text": True},
        ["text of 10 tokens", "context of 8 tokens, texts of at most 9 tokens", "shorten it"],
    ),
    (
        errors.TokenIdError(70, 2, 64),
        {"token_id": 70, "position": 2, "vocab_size": 64},
        ["70 at position 2 is outside", "0 to 63"],
    ),
    (
        errors.TokenIdError(70, 2, 64, "stop"),
        {"argument": "stop"},
        ["70 at position 2 of stop is outside", "0 to 63"],
    ),
    (
        errors.TokenIdError(-1, 2, 64),
        {},
        ["0 to 63. -1 stands for no token: pass ids[ids >= 0]"],
    ),
    (errors.TokenTypeError("float 1.5"), {"found": "float 1.5"}, ["integers", "float 1.5"]),
    (
        errors.UnknownAdapterError("b", ["z", "a"]),
        {"name": "b", "loaded": ("a", "z")},
        ["'b'", "Loaded: a, z", "load_lora"],
    ),
    (errors.UnknownAdapterError("b"), {"loaded": ()}, ["Loaded: none"]),
    (
        errors.PopulationError([3, 5], 8, ValueError("too long")),
        {"members": (3, 5), "size": 8},
        ["2 of 8 members", "member 3, 5", "too long"],
    ),
    (errors.AdapterError("no folder"), {}, ["no folder"]),
    (errors.AdapterLimitError("4 are loaded"), {}, ["4 are loaded"]),
    (
        errors.UnsupportedCapabilityError("lora", "toy"),
        {"capability": "lora", "engine": "toy"},
        ["engine 'toy'", "support 'lora'", "genlm plugins"],
    ),
    (errors.UnsupportedCapabilityError(Capability.LORA, "toy"), {}, ["support 'lora'"]),
    (
        errors.UnsupportedCapabilityError("lora", "toy", "load it with lora=True"),
        {"hint": "load it with lora=True"},
        ["support 'lora'; load it with lora=True"],
    ),
    (errors.EvaluationError("it raised"), {}, ["it raised"]),
    (errors.EngineClosedError("closed"), {}, ["closed"]),
    (errors.EngineDiedError("died"), {}, ["died"]),
    (errors.QueryResetError("reset"), {}, ["reset"]),
    (errors.ModelLoadError("no such model"), {}, ["no such model"]),
    (errors.VocabularyError("no bytes"), {}, ["no bytes"]),
    (errors.TokenizerError("no encode"), {}, ["no encode"]),
    (
        errors.WeightsError("shape (3,)", "shape (2,)"),
        {"expected": "shape (3,)", "found": "shape (2,)"},
        ["expected shape (3,); found shape (2,)", "position of the token"],
    ),
    (
        errors.UnknownBackendError("sgl", "engine", ["hf", "a", "hf"], "Do this.", "GENLM_B"),
        {"name": "sgl", "kind": "engine", "installed": ("a", "hf"), "hint": "Do this."},
        ["no engine named 'sgl' (from GENLM_B). Installed: a, hf. Do this."],
    ),
    (
        errors.UnknownBackendError(None, "trie"),
        {"name": None, "installed": (), "source": None},
        ["no trie chosen. Installed: none."],
    ),
    (
        errors.AmbiguousBackendError("hf", "engine", ["q:hf", "p:hf"]),
        {"name": "hf", "kind": "engine", "providers": ("p:hf", "q:hf")},
        ["2 distributions", "engine 'hf'", "'p:hf' or 'q:hf'"],
    ),
    (
        errors.MissingRequirementError("p:hf", ["torch", "peft"], "pip install peft"),
        {"plugin": "p:hf", "missing": ("torch", "peft"), "install": "pip install peft"},
        ["p:hf needs torch and peft, which are not installed: pip install peft"],
    ),
    (
        errors.BrokenPluginError("p:hf", "it raised"),
        {"plugin": "p:hf", "reason": "it raised"},
        ["p:hf is broken: it raised"],
    ),
    (
        errors.PluginApiError("p:hf", 0, 1),
        {"plugin": "p:hf", "found": 0, "expected": 1},
        ["p:hf implements version 0", "--upgrade p"],
    ),
    (errors.PluginApiError("p:hf", 2, 1), {}, ["--upgrade genlm-core"]),
]


def all_classes(base: type = errors.GenlmError) -> set[type]:
    return {base}.union(*(all_classes(subclass) for subclass in base.__subclasses__()))


def drawn_tree() -> dict[str, list[str]]:
    """Each class in the module's docstring with the bases that the drawing gives it."""
    bases: dict[str, list[str]] = {}
    open_branches: list[tuple[int, str]] = []
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        match = re.match(r"( {4}[ │├└─]*)([A-Z]\w+)(?: +\((\w+)\))?(?:  |$)", line)
        if match is None:
            continue
        indent, name, builtin = len(match[1]), match[2], match[3]
        open_branches = [branch for branch in open_branches if branch[0] < indent]
        parents = [parent for _, parent in open_branches[-1:]]
        bases[name] = parents + ([builtin] if builtin else [])
        open_branches.append((indent, name))
    return bases


def test_the_drawn_tree_holds_every_class_under_its_real_parents() -> None:
    tree = drawn_tree()
    classes = {
        error_class
        for error_class in all_classes()
        if error_class.__module__ == errors.__name__
    }
    assert set(tree) == {error_class.__name__ for error_class in classes}
    for error_class in classes - {errors.GenlmError}:
        assert [base.__name__ for base in error_class.__bases__] == tree[error_class.__name__]


def test_every_class_that_is_raised_has_an_example_here() -> None:
    bases = {"GenlmError", "QueryError", "EngineError", "PluginError"}
    examples = {type(error).__name__ for error, _, _ in EXAMPLES}
    assert examples | bases == set(drawn_tree())


@pytest.mark.parametrize(("error", "attributes", "parts"), EXAMPLES, ids=repr)
def test_an_error_keeps_its_data_and_says_what_to_do(
    error: errors.GenlmError, attributes: dict[str, Any], parts: list[str]
) -> None:
    for name, value in attributes.items():
        assert getattr(error, name) == value
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize("error", [example[0] for example in EXAMPLES], ids=repr)
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda error: pickle.loads(pickle.dumps(error)),
        lambda error: type(error)(*error.args),
    ],
    ids=["copy", "deepcopy", "pickle", "from its args"],
)
def test_a_duplicate_is_the_same_error(error: errors.GenlmError, duplicate: Any) -> None:
    other = duplicate(error)
    assert other is not error
    assert type(other) is type(error)
    assert str(other) == str(error)
    # By their text: an exception among them equals only itself.
    assert repr(other.args) == repr(error.args)
    assert repr(vars(other)) == repr(vars(error))


def test_a_note_travels_with_the_error() -> None:
    error = errors.TokenIdError(70, 2, 64)
    error.add_note("in the third prompt")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert other.__notes__ == ["in the third prompt"]
