"""Every public name of genlm-backend 0.3.1 is here and takes what it took.

`surface.txt` was written by `scripts/backend_surface.py` from the published wheel.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

LINES = (Path(__file__).parent / "surface.txt").read_text().splitlines()

OMITTED = {
    "genlm.backend.llm.base batch_abandoned": "made the error of a batch without a leader",
    "genlm.backend.llm.base fail_futures": "ended the futures of a batch without a leader",
    "genlm.backend.llm.vllm BackendScheduler": "a class of vLLM's scheduler with changes of "
    "its own; genlm-vllm uses vLLM's as it is",
}
"""Inner parts of the published package that nothing here could mean; with reasons."""

OTHER_DEFAULTS = {
    ("AsyncTransformer.__init__", "batch_size"): "as many as are waiting, not 20",
}

NEWER = """
genlm.backend.draw draw_from async (weights, target=None)
genlm.backend.draw logsumexp_from async (weights)
genlm.backend.draw logp_at async (weights, index)
genlm.backend.draw set_draw_method def (method)
genlm.backend.draw gumbel_max def (logps)
genlm.backend.draw multinomial def (logps)
genlm.backend.draw inverse_cdf def (logps)
genlm.backend.llm temper exported
genlm.backend.llm.engine_control EngineControl class
genlm.backend.llm.engine_control EngineControl.draw def (self, logits, handles)
genlm.backend.llm.engine_control EngineControl.drain_aborts def (self)
genlm.backend.llm.engine_control EngineControl.drain_adds def (self)
genlm.backend.llm.engine_control EngineControl.on_burst_end def (self)
genlm.backend.llm.base AsyncLM.lora_view def (self, lora_name)
genlm.backend.llm.hf AsyncTransformer.run_burst def (self, control, max_steps)
genlm.backend.llm.vllm AsyncVirtualLM.run_burst def (self, control, max_steps)
genlm.backend.llm.base temper def (row, temperature)
""".strip().splitlines()
"""In the library's sources after 0.3.1."""


def parsed(line: str) -> tuple[str, str, str, inspect.Signature | None]:
    """Module, dotted name, kind and signature of a line."""
    module, name, kind, *rest = line.split(" ", 3)
    if not rest:
        return module, name, kind, None
    arguments = ast.parse(f"lambda {rest[0][1:-1]}: 0", mode="eval").body
    return module, name, kind, inspect.signature(eval(ast.unparse(arguments)))


def found(module: str, name: str) -> Any:
    value = importlib.import_module(module)
    for part in name.split("."):
        value = inspect.getattr_static(value, part, None) or getattr(value, part)
    return value


def plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


@pytest.mark.parametrize("line", [*LINES, *NEWER])
def test_a_published_name_is_here_and_takes_what_it_took(line):
    module, name, kind, expected = parsed(line)
    if any(f"{module} {name}.".startswith(f"{omitted}.") for omitted in OMITTED):
        return
    value = found(module, name)
    if kind == "exported":
        assert name in importlib.import_module(module).__all__
    elif kind == "class":
        assert inspect.isclass(value)
    elif kind == "property":
        assert isinstance(value, property)
    else:
        assert inspect.iscoroutinefunction(plain(value)) == (kind == "async")
        if kind in {"classmethod", "staticmethod"}:
            assert type(value).__name__ == kind
        check_parameters(name, inspect.signature(plain(value)), expected)


def check_parameters(name, ours, published):
    """Positional ones stand where they stood, under their names, with their defaults."""
    takes_more = [p for p in ours.parameters.values() if p.kind is p.VAR_POSITIONAL]
    for place, (key, parameter) in enumerate(published.parameters.items()):
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            assert any(p.kind is parameter.kind for p in ours.parameters.values())
            continue
        own = list(ours.parameters.values())[place] if not takes_more else None
        assert own is not None, f"{name} takes too few"
        assert own.name == key
        assert own.kind is own.POSITIONAL_OR_KEYWORD, key
        if parameter.default is parameter.empty:
            continue
        if (name, key) not in OTHER_DEFAULTS:
            assert own.default == parameter.default, key
    for own in list(ours.parameters.values())[len(published.parameters) :]:
        optional = own.default is not own.empty or own.kind in {
            own.VAR_KEYWORD,
            own.VAR_POSITIONAL,
        }
        assert optional, f"{name} needs {own.name}, which was not published"


def test_every_omission_is_a_published_name():
    names = {" ".join(line.split(" ")[:2]) for line in LINES}
    assert OMITTED.keys() <= names
    for module, name in map(str.split, OMITTED):
        with pytest.raises(AttributeError):
            found(module, name)


def test_all_modules_export_what_they_say():
    modules = {line.split(" ")[0] for line in LINES}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in map(importlib.import_module, modules):
            assert all(hasattr(module, name) for name in module.__all__)
