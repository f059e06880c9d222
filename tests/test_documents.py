"""Programs in READMEs and docs/ run, and links point at existing files."""

from __future__ import annotations

import asyncio
import logging
import re
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

import peft
import pytest
import torch
import transformers
from documents import REPOSITORY, blocks, run
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pretend_device import SECOND, accelerated

import genlm
from genlm.testing import TinyModel
from genlm_llamacpp.conformance import TinyGguf

PATTERNS = "*.md", "core/*.md", "docs/**/*.md", "plugins/*/*.md"
HOST = "https://github.com/genlm/genlm"
SHOWN_BY_INDEXES = [
    REPOSITORY / "core/README.md",
    *sorted(REPOSITORY.glob("plugins/*/README.md")),
]
PAGES = [page for pattern in PATTERNS for page in sorted(REPOSITORY.glob(pattern))]


@pytest.fixture(scope="module")
def demo() -> Path:
    """The folder of the demo model."""
    with genlm.load_model("demo", "hf") as llm:
        return Path(llm.tokenizer.name_or_path)


@pytest.fixture(scope="module")
def adapter(demo, tmp_path_factory) -> Path:
    """An adapter that changes the demo model's rows."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    """Spans of the provider that a program sets, which a process can do only once."""
    exporter = InMemorySpanExporter()

    def set_tracer_provider(provider):
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    monkeypatch.setattr(trace, "set_tracer_provider", set_tracer_provider)
    return exporter


def test_the_guide_runs_on_an_accelerator(monkeypatch, spans, caplog):
    """Rows and results are on different devices."""
    torch.manual_seed(0)  # of the adapter
    caplog.set_level(logging.WARNING, "genlm.batches")  # the level to return to
    with accelerated(monkeypatch):
        names = asyncio.run(run("".join(blocks("docs/guide.md")), {}))
    assert names["product"].device == names["difference"].device == SECOND


def test_the_guide_runs_from_top_to_bottom_as_it_stands(caplog, spans):
    torch.manual_seed(0)  # of the adapter
    caplog.set_level(logging.WARNING, "genlm.batches")  # also the level to return to
    caplog.handler.setLevel(logging.NOTSET)
    names = asyncio.run(run("".join(blocks("docs/guide.md")), {}))
    assert names["ids"] == names["begin"] + names["tokens"]("The function returns")
    first, second = names["perplexities"]
    assert first < second
    assert names["best"] in names["drawn"]
    assert names["digits"][names["token"].token_id]
    assert list(names["particles"][0][0].token_ids[:-1]) == names["ids"]
    assert names["product"].logsumexp(0) == pytest.approx(0, abs=1e-4)
    assert names["difference"].abs().max() > 0.1
    assert names["accuracy"] in (0.0, 1.0)
    assert names["ratios"].tolist() == pytest.approx([1] * len(names["ratios"]), abs=1e-4)
    assert "genlm-hf: step of 2 queries, 2 finished, 2 tokens computed, " in caplog.text
    assert {span.name for span in spans.get_finished_spans()} == {"genlm.batch"}


def test_the_weights_of_stochastic_beams_have_the_sum_1():
    """Of three beams after one step, from a row of equal probabilities."""
    [program] = [block for block in blocks("docs/guide.md") if "perturbed" in block]
    program = program.replace("range(6)", "range(1)").replace("5", "3")
    program = program.replace("seed=1", "seed=seed")
    source = f"sums = []\nfor seed in range(400):\n{indent(program, '    ')}"
    source += """\
    log_probs, threshold = log_probs[:-1], perturbed[-1]
    sums.append((log_probs - (-torch.expm1(-(log_probs - threshold).exp())).log()).exp().sum())
"""
    torch.manual_seed(0)
    with genlm.load_model("demo", "reference", text=bytes(range(256)), order=1) as llm:
        names = asyncio.run(run(source, {"llm": llm, "ids": [97], "torch": torch}))
    sums = torch.stack(names["sums"])
    assert abs(sums.mean() - 1) < 4 * sums.std() / 20


def test_the_readme_runs(demo, adapter, capsys):
    particles, rows, methods = blocks("README.md")
    names = {}
    for program, printed in zip((particles, rows), blocks("README.md", "text"), strict=True):
        exec(program, names)
        assert capsys.readouterr().out == printed
    source = methods.replace("path/to/model", str(demo))
    source = source.replace("path/to/adapter", str(adapter))
    model = transformers.AutoModelForCausalLM.from_pretrained(demo)
    names = asyncio.run(run(source, {"genlm": genlm, "ids": [1, 2, 3], "model": model}))
    assert names["drawn"].token_id in (7, 8)
    assert names["many"].lengths.tolist() == [4] * 100
    assert len(names["continuation"]) <= 50
    assert isinstance(names["text"], str)
    assert not torch.equal(names["row"], names["rows"][0])


def test_the_readme_of_genlm_core_prints_what_it_says(capsys):
    [program] = blocks("core/README.md")
    exec(program, {})
    printed = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert printed in blocks("core/README.md", "")


def test_the_first_example_of_the_package_is_true():
    lines = genlm.__doc__.partition("\n\n")[2].splitlines()
    source = "\n".join(line.strip() for line in lines if line.startswith("    "))
    *program, shown = source.splitlines()
    expression, said = shown.split("  # ")
    names = asyncio.run(run("\n".join([*program, f"found = {expression}"]), {"genlm": genlm}))
    names["llm"].close()
    assert repr(names["found"]) == said


def test_the_readme_of_genlm_hf_runs(adapter, capsys):
    program, adapters = blocks("plugins/genlm-hf/README.md")
    names: dict[str, Any] = {}
    exec(program, names)
    assert capsys.readouterr().out == blocks("plugins/genlm-hf/README.md", "text")[0]
    assert names["rows"].shape == (2, names["llm"].vocab_size)
    with genlm.load_model("demo", "hf") as llm:
        source = adapters.replace("path/to/adapter", str(adapter))
        asyncio.run(run(source, names | {"llm": llm, "ids": [1, 2, 3]}))


def test_the_readme_of_genlm_mlx_runs(tmp_path):
    model = TinyModel(tmp_path / "model", adapters=["red"])
    program, adapters = blocks("plugins/genlm-mlx/README.md")
    names: dict[str, Any] = {}
    exec(program.replace("path/to/model", str(model.path)), names)
    assert names["rows"].shape == (2, names["llm"].vocab_size)
    with genlm.load_model(model.path, "mlx") as llm:
        source = adapters.replace("path/to/adapter", model.adapters["red"])
        names = asyncio.run(run(source, {"llm": llm, "ids": [5, 6, 7]}))
    expected = model.logprobs([5, 6, 7], "red")
    torch.testing.assert_close(names["row"].double(), expected, atol=1e-4, rtol=0)


def test_the_readme_of_genlm_llamacpp_runs(tmp_path):
    model = TinyGguf(tmp_path / "model", "llama")
    program, adapters = blocks("plugins/genlm-llamacpp/README.md")
    names: dict[str, Any] = {}
    exec(program.replace("path/to/model.gguf", str(model.file)), names)
    assert names["rows"].shape == (2, names["llm"].vocab_size)
    with genlm.load_model(model.file, "llamacpp", n_ctx=256) as llm:
        source = adapters.replace("path/to/adapter", model.adapters["red"])
        names = asyncio.run(run(source, {"llm": llm, "ids": [5, 6, 7]}))
    expected = model.logprobs([5, 6, 7], "red")
    torch.testing.assert_close(names["row"].double(), expected, atol=1e-4, rtol=0)


def test_the_readme_of_genlm_lm_eval_runs():
    [program] = blocks("plugins/genlm-lm-eval/README.md")
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["accuracy"] in (0.0, 1.0)


def test_the_page_on_tries_runs():
    with genlm.load_model("demo", "hf") as llm:
        rows = llm.batch_next_token_logprobs_sync([[1], [2]])
        below = torch.tensor([token.byte_string.startswith(b"th") for token in llm.byte_vocab])
        names = {"genlm": genlm, "llm": llm, "ids": [1], "rows": rows, "logws": rows[0]}
        names |= {"ws": rows[0].exp(), "frontier": [0, 1600]}
        asyncio.run(run("".join(blocks("docs/tries.md")), names))
    expected = rows.masked_fill(~below, float("-inf")).logsumexp(1)
    torch.testing.assert_close(names["mass"][:, names["node"]], expected)


def test_the_readme_of_genlm_trie_cuda_runs():
    program, _ = blocks("plugins/genlm-trie-cuda/README.md")
    with genlm.load_model("demo", "hf") as llm:
        names = {"llm": llm, "prompts": [[1], [2]]}
        asyncio.run(run(program, names))
        assert isinstance(names["mass"], torch.Tensor)
        assert names["mass"].device == names["logprobs"].device
        root = names["mass"][:, names["trie"].root]
        torch.testing.assert_close(root, torch.zeros(2), atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_reductions_are_captured_as_the_readme_of_genlm_trie_cuda_shows():
    _, program = blocks("plugins/genlm-trie-cuda/README.md")
    trie = genlm.get_trie("cuda")([b"a", b"ab", b"b"])
    rows = torch.rand(2, 3, device="cuda")
    names = asyncio.run(run(program, {"torch": torch, "trie": trie, "rows": rows}))
    expected = trie.batch_weight_sum(rows, returns="torch")
    names["graph"].replay()
    torch.testing.assert_close(names["mass"], expected)


def test_the_index_of_decisions_has_each_by_its_title():
    index = (REPOSITORY / "docs/decisions/README.md").read_text("utf-8")
    for page in sorted((REPOSITORY / "docs/decisions").glob("0*.md")):
        number, _, title = page.read_text("utf-8").partition("\n")[0][2:].partition(". ")
        assert f"{number}. [{title}]({page.name})" in index.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_has_no_placeholders(page):
    """Names of constants and variables are code, so a bare one is text that nobody wrote."""
    prose = re.sub(
        r"```.*?```|`[^`]*`|\]\([^)]*\)", "", page.read_text("utf-8"), flags=re.DOTALL
    )
    names = {*re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b|\b(?:TODO|TBD|FIXME|FEW)\b", prose)}
    assert names <= {"GENLM_BACKEND", "RAY_ADDRESS", "RLIMIT_AS"}


def test_the_readme_installs_torch_for_the_cpu_as_the_page_on_installing_does():
    lines = "".join(blocks("README.md", "bash")).splitlines()
    [line] = [line for line in lines if line.endswith("/whl/cpu")]
    assert line in blocks("docs/installing.md", "bash")[1].splitlines()
    required = (REPOSITORY / "requirements.txt").read_text("utf-8").splitlines()
    assert [each for each in required if each.startswith("torch")] == [line.split("'")[1]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_points_at_exists(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if ours := re.fullmatch(rf"{HOST}/(blob|tree)/main/(.*)", link):
            assert (REPOSITORY / ours[2]).is_dir() == (ours[1] == "tree"), link
            assert (REPOSITORY / ours[2]).exists(), link
        else:
            assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", SHOWN_BY_INDEXES, ids=lambda page: page.parent.name)
def test_links_of_a_distributions_readme_work_on_a_package_index(page):
    """Which shows the README without the files around it, so a link is absolute."""
    project = tomllib.loads((page.parent / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]["Homepage"] == HOST
    for link in re.findall(r"\]\(([^)\s]+)", page.read_text("utf-8")):
        assert link.startswith(("https://", "#")), link
