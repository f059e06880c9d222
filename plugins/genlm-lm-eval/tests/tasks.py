"""Tasks from local files, and what the harness computes for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

TASKS = ("tiny_choice", "tiny_shots", "tiny_rolling", "tiny_generation")

_SENTENCES = (
    "Once upon a time there was a fox who ran through the woods",
    "The windy hills were far away",
    "a fox and a hill",
    "who was there upon the hills? The fox was.",
)

_COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{documents}", train: "{documents}"}}
  cache_dir: "{cache}"
test_split: test
"""

_YAML = {
    "tiny_choice": """
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_shots": """
task: tiny_shots
output_type: multiple_choice
fewshot_split: train
num_fewshot: 3
doc_to_text: "Q: {{text}} A:"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "tiny_rolling": """
task: tiny_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "tiny_generation": """
task: tiny_generation
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 20, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def documents() -> list[dict[str, Any]]:
    """Texts shorter and longer than the model's context, with answers that share beginnings."""
    return [
        {
            "text": text,
            "choices": [" the fox", " the fox ran", " a hill", " woods"],
            "label": place % 4,
            "long": " ".join([text] * (1 + 4 * place)),
        }
        for place, text in enumerate(_SENTENCES)
    ]


def write_tasks(folder: Path) -> None:
    """Write the documents and a YAML file for each task."""
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in documents()))
    common = _COMMON.format(documents=path, cache=folder / "cache")
    for name, text in _YAML.items():
        (folder / f"{name}.yaml").write_text(text + common)


def evaluate(model: Any, folder: Path, *tasks: str, **options: Any) -> dict[str, Any]:
    """Return what the harness measures for tasks of a folder."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: dict[str, Any] | None = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
    )
    assert found is not None
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """Return the model's answers to the requests of a task, in their order."""
    samples = sorted(found["samples"][task], key=lambda each: each["doc_id"])
    return [each["resps"] for each in samples]


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    """Return requests as the harness makes them."""
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=place)
        for place, each in enumerate(arguments)
    ]
