"""Write docs/hf-architectures.md: which tier serves each family, and its error.

Builds the tiny random models of the tests, serves each with the default options, and
compares rows with an unbatched float32 forward pass: first all sequences, then each
grown by one token, then all again from the cache.

Run from the repository root: `python scripts/hf_architectures.py`
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from genlm_hf.engine import HFEngine

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "plugins" / "genlm-hf" / "tests"
HEADER = """# Architectures and their tiers

Made by `python scripts/hf_architectures.py` with transformers {transformers} and torch
{torch}; do not edit. Tiny models with large random weights, float32, on the CPU. *Error* is
the largest difference in log-probability between served rows and an unbatched forward pass,
over three steps of mixed lengths, one new token each, and repeats. The tiers are explained
in [hf-engine.md](hf-engine.md); every family is right in the tier `padded` too.

| Family | Tier | Error | Why no faster one |
|---|---|---|---|
"""


def test_module(name: str) -> ModuleType:
    """Import a module of the tests as a part of a package."""
    spec = importlib.util.spec_from_file_location(f"hf_tests.{name}", TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def largest_error(tiny: Any, model: Any, engine: HFEngine, lengths: tuple[int, ...]) -> float:
    """Return the largest difference to unbatched rows over three steps."""
    sequences = tiny.ids_of_lengths(*lengths)
    errors = []
    for step in (sequences, [[*ids, 5] for ids in sequences], sequences):
        for ids, row in zip(step, tiny.answers(engine, step), strict=True):
            errors.append((row - tiny.alone(model, ids)).abs().max())
    return float(torch.stack(errors).max())  # NaN if one is


def main() -> None:
    """Measure every family and write the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    package = ModuleType("hf_tests")
    package.__path__ = [str(TESTS)]
    sys.modules["hf_tests"] = package
    tiny, tests = test_module("tiny"), test_module("test_architectures")
    tokenizer = tiny.make_tokenizer()
    lines = []
    for name, (model_type, settings) in tests.FAMILIES.items():
        model = tiny.build_model(model_type, **settings)
        engine = HFEngine.from_model(model, tokenizer)
        error = largest_error(tiny, model, engine, tests.LENGTHS)
        figures = engine.statistics()
        why = str(figures["tier_reason"]).replace("the fastest", "")
        lines.append(f"| {name} | {figures['tier']} | {error:.1e} | {why} |\n")
        print(lines[-1], end="", flush=True)
        engine.close()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (ROOT / "docs" / "hf-architectures.md").write_text(
        HEADER.format(**versions) + "".join(lines)
    )


if __name__ == "__main__":
    main()
