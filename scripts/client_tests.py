"""Run the tests of genlm-control, genlm-bytes or llamppl on this project's genlm.backend.

    python scripts/client_tests.py FOLDER [--python PYTHON] [--tokenizer FOLDER] [--engine NAME]
                                   [OPTION OF PYTEST ...]

FOLDER is an unpacked source distribution or a checkout, whose `tests` run unchanged. PYTHON, by
default this interpreter, has the client, its test requirements, and this project's packages;
one with genlm-backend 0.3.1 gives the results to compare with. The tests of a checkout run with
the client of the checkout if PYTHONPATH is its folder. Nothing is downloaded: the hub
ids that the tests load name a GPT-2 of two random layers, made in `build/clients`, with
the tokenizer in that folder (`vocab.json` and `merges.txt` of GPT-2), so tests that
expect text of GPT-2 fail with every backend. With `--engine`, tests that create an
`AsyncVirtualLM` and skip without CUDA, as genlm-control's gates, run on hf, vllm or sgl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parent.parent / "build" / "clients"
HUB_IDS = (
    *("gpt2", "gpt2-medium", "openai-community/gpt2"),
    "mlx-community/Llama-3.2-1B-Instruct-4bit",  # of a test that only loads it, with MLX
)
SNAPSHOT = "0" * 40


def make_hub(tokenizer: Path) -> None:
    """Write the stand-in into a hub cache under each of the hub ids."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    model = BUILD / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizer / name, model)
    end = "<|endoftext|>"
    special = {"bos_token": end, "eos_token": end, "unk_token": end}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, **special}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    AutoTokenizer.from_pretrained(model).save_pretrained(model)
    torch.manual_seed(0)
    # A wide initialisation: the context determines the next token, as in a trained model.
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_ctx=1024, initializer_range=0.3)
    GPT2LMHeadModel(config).transformer.save_pretrained(model)  # the names that mlx-lm reads
    for name in HUB_IDS:
        folder = BUILD / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(model, folder / "snapshots" / SNAPSHOT)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(SNAPSHOT)


PLUGIN = """
import os, sys
import torch
import genlm.backend.llm as llm

has_cuda, virtual = torch.cuda.is_available, llm.AsyncVirtualLM
engine = os.environ["CLIENT_ENGINE"]


class AsyncVirtualLM:
    @staticmethod
    def from_name(name, engine_opts=None):
        if engine == "vllm":
            options = {**(engine_opts or {}), "dtype": "float32"}
            return virtual.from_name(name, engine_opts=options)
        return llm.load_model_by_name(name, engine)


def is_available():
    caller = sys._getframe(1).f_code.co_filename
    return os.path.basename(caller).startswith(("test_", "gen_")) or has_cuda()


torch.cuda.is_available, llm.AsyncVirtualLM = is_available, AsyncVirtualLM
"""


def main() -> int:
    """Make the stand-in if there is none, and run pytest; return its status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--tokenizer", type=Path, help="needed once")
    parser.add_argument("--engine", choices=["hf", "vllm", "sgl"])
    options, pytest_options = parser.parse_known_args()
    if not (BUILD / "hub").exists():
        if options.tokenizer is None:
            parser.error(
                "--tokenizer: the stand-in of GPT-2 needs its vocab.json and merges.txt"
            )
        make_hub(options.tokenizer)
    environment = {**os.environ, "HF_HUB_CACHE": str(BUILD / "hub"), "HF_HUB_OFFLINE": "1"}
    if options.engine:
        (BUILD / "client_engine.py").write_text(PLUGIN)
        paths = [str(BUILD), environment.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "CLIENT_ENGINE": options.engine}
        pytest_options = ["-p", "client_engine", *pytest_options]
    command = [
        options.python,
        "-m",
        "pytest",
        "-q",
        "--override-ini",
        "addopts=",
        *pytest_options,
    ]
    return subprocess.run(command, cwd=options.folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
