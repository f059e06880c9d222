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

OLDER = """
genlm.backend.llm.hf AsyncTransformer.set_lora def (self, lora_path=None, lora_name='lora_1')
genlm.backend.llm.hf AsyncTransformer.clear_lora def (self)
genlm.backend.llm.hf AsyncTransformer.add_query def (self, query, future, past)
genlm.backend.llm.vllm AsyncVirtualLM.__init__ def (self, engine, logprobs, cache_size=0)
genlm.backend.llm.vllm AsyncVirtualLM.set_lora def (self, lora_path, lora_name='lora_1')
genlm.backend.llm.vllm AsyncVirtualLM.clear_lora def (self)
genlm.backend.llm.vllm AsyncVirtualLM.hash_to_int def (self, value)
genlm.backend.llm.vllm GlobalLogprobsCapture class
genlm.backend.llm.vllm GlobalLogprobsCapture.__init__ def (self, device)
genlm.backend.llm.vllm GlobalLogprobsCapture.apply def (self, logits)
genlm.backend.llm.vllm GlobalLogprobsCapture.is_argmax_invariant def (self)
genlm.backend.llm.vllm GlobalLogprobsCapture.update_state def (self, batch_update)
genlm.backend.llm.vllm GlobalLogprobsCapture.get_logprobs def (self, batch_index=0)
genlm.backend.llm.vllm GlobalLogprobsCapture.get_all_logprobs def (self)
genlm.backend.llm.vllm GlobalLogprobsCapture.clear def (self)
genlm.backend.trie.async_impl AsyncTokenCharacterTrie.mass_sum async (self, ws)
genlm.backend.trie.base TokenCharacterTrie.mass_sum def (self, ws)
""".strip().splitlines()
"""Documented before 0.3.1; names of positional parameters changed from version to version."""

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


@pytest.mark.parametrize("line", [*LINES, *OLDER, *NEWER])
def test_a_published_name_is_here_and_takes_what_it_took(line):
    module, name, kind, expected = parsed(line)
    if any(f"{module} {name}".startswith(omitted) for omitted in OMITTED):
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
        check_parameters(name, inspect.signature(plain(value)), expected, line in OLDER)


def check_parameters(name, ours, published, by_position):
    """Positional ones stand where they stood, under their names, with their defaults."""
    takes_more = [p for p in ours.parameters.values() if p.kind is p.VAR_POSITIONAL]
    for place, (key, parameter) in enumerate(published.parameters.items()):
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            assert any(p.kind is parameter.kind for p in ours.parameters.values())
            continue
        own = list(ours.parameters.values())[place] if not takes_more else None
        assert own is not None, f"{name} takes too few"
        if not by_position:
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


def test_all_modules_export_what_they_say():
    modules = {line.split(" ")[0] for line in LINES}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in map(importlib.import_module, modules):
            assert all(hasattr(module, name) for name in module.__all__)
