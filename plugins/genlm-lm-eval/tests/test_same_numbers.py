"""The harness measures the same with `genlm` and with its own `hf`, on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from genlm_lm_eval import GenlmLM

from .tasks import TASKS, evaluate, requests, responses


@pytest.fixture(scope="module", params=["plain", "bos"])
def checkpoint(request: pytest.FixtureRequest, folder: Path, bos_folder: Path) -> Path:
    return {"plain": folder, "bos": bos_folder}[request.param]


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> Iterator[tuple[GenlmLM, Any]]:
    ours = GenlmLM(str(checkpoint), "hf")
    yield ours, HFLM(pretrained=str(checkpoint), device="cpu", batch_size=3)
    ours.close()


def _numbers(value: Any) -> list[float]:
    """All numbers of nested answers; texts as they are."""
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in _numbers(each)]
    return [value]


@pytest.mark.parametrize("task", TASKS)
def test_tasks_have_the_results_of_hf(task, models, task_folder):
    ours, theirs = (evaluate(model, task_folder, task) for model in models)
    found, expected = (_numbers(responses(each, task)) for each in (ours, theirs))
    assert len(found) >= 4
    assert found == pytest.approx(expected, abs=1e-4) if task != TASKS[3] else found == expected
    metrics, known = ours["results"][task], theirs["results"][task]
    assert metrics.keys() == known.keys()
    for name, value in metrics.items():
        if isinstance(value, float):
            assert value == pytest.approx(known[name], rel=1e-4)


CONTEXTS = ["", "Once upon a time ", "<s>the fox", "a fox ran through the woods " * 12]


def test_continuations_of_empty_and_of_too_long_contexts(models):
    asked = [
        (text, answer) for text in CONTEXTS for answer in (" the", "hills", " and a", "<s>a")
    ]
    ours, theirs = (each.loglikelihood(requests("loglikelihood", *asked)) for each in models)
    assert [each for each, _ in ours] == pytest.approx([each for each, _ in theirs], abs=1e-4)
    assert [each for _, each in ours] == [each for _, each in theirs]


def test_the_most_likely_continuation_is_greedy(models):
    context = models[0].tok_encode("Once upon a time")
    greedy: list[int] = []
    for _ in range(3):
        greedy.append(models[0].llm.draw_sync(context + greedy, temperature=0).token_id)
    other = [*greedy[:2], (greedy[2] + 1) % 300]
    asked = [(None, context, greedy), (None, context, other), (None, context, greedy[:1])]
    for model in models:
        found = model._loglikelihood_tokens(asked, disable_tqdm=True)
        assert [each for _, each in found] == [True, False, True]


@pytest.mark.parametrize("until", [[], ["e"], [" t", "a"], "s", ["\n"], ["</s>"]])
def test_greedy_continuations_are_those_of_hf(until, models):
    arguments = {"until": until, "max_gen_toks": 24, "temperature": 0.0}
    asked = [(text, arguments) for text in CONTEXTS[1:]]
    ours = models[0].generate_until(requests("generate_until", *asked))
    # One at a time: in a batch `hf` looks at the first text only to decide on <s>.
    theirs = [
        models[1].generate_until(requests("generate_until", one), disable_tqdm=True)[0]
        for one in asked
    ]
    assert ours == theirs
    assert any(ours)


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_add_bos_token_means_what_it_means_for_hf(add_bos_token, checkpoint):
    with GenlmLM(str(checkpoint), "hf", add_bos_token=add_bos_token).llm as llm:
        ours = GenlmLM(llm, add_bos_token=add_bos_token)
        theirs = HFLM(pretrained=str(checkpoint), device="cpu", add_bos_token=add_bos_token)
        for text in ("the fox", "<s>the fox"):
            assert ours.tok_encode(text) == theirs.tok_encode(text)
        asked = requests("loglikelihood", ("a fox", " ran"), ("", " ran"))
        expected = [each for each, _ in theirs.loglikelihood(asked)]
        assert [each for each, _ in ours.loglikelihood(asked)] == pytest.approx(
            expected, abs=1e-4
        )


def test_conversations_are_written_as_hf_writes_them(models):
    history = [{"role": "user", "content": "who?"}, {"role": "fox", "content": "I"}]
    ours, theirs = models
    for prompt in (True, False):
        assert ours.apply_chat_template(history, prompt) == theirs.apply_chat_template(
            history, prompt
        )
    refused = [{"role": "system", "content": "short"}, *history]
    assert ours.apply_chat_template(refused) == ours.apply_chat_template(history)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name


def test_tasks_with_a_chat_template_have_the_results_of_hf(models, task_folder):
    ours, theirs = (
        evaluate(each, task_folder, "tiny_shots", apply_chat_template=True, num_fewshot=1)
        for each in models
    )
    found, expected = (_numbers(responses(each, "tiny_shots")) for each in (ours, theirs))
    assert found == pytest.approx(expected, abs=1e-4)
    arguments = ours["samples"]["tiny_shots"][0]["arguments"]
    assert "user: Q:" in str(arguments)


def test_an_adapter_changes_the_numbers_as_it_does_for_hf(folder, tmp_path):
    from genlm.testing import TinyModel

    from .conftest import SETTINGS

    model = TinyModel(tmp_path / "model", SETTINGS, adapters=["red"])
    asked = requests("loglikelihood", ("a fox", " ran"), ("the", " hills"))
    theirs = HFLM(pretrained=str(model.path), device="cpu", peft=model.adapters["red"])
    expected = [each for each, _ in theirs.loglikelihood(asked)]
    ours = GenlmLM(str(model.path), "hf", peft=model.adapters["red"])
    found = [each for each, _ in ours.loglikelihood(asked)]
    ours.close()
    plain = GenlmLM(str(model.path), "hf")
    without = [each for each, _ in plain.loglikelihood(asked)]
    plain.close()
    assert found == pytest.approx(expected, abs=1e-4)
    assert abs(found[0] - without[0]) > 0.01
