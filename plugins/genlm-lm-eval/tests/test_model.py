"""What `GenlmLM` asks of a model, and what it does beyond the harness's own `hf`."""

from __future__ import annotations

import functools
import json
import logging
import sys

import lm_eval.tasks
import pytest
import torch
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import genlm
from genlm.testing import tiny_tokenizer
from genlm_lm_eval import GenlmLM
from genlm_lm_eval.__main__ import main

from .tasks import documents, evaluate, requests, responses

MODEL_ARGS = "backend=hf,pretrained={}"


class _Hook:
    """The harness's cache of answers."""

    def __init__(self):
        self.kept = []

    def add_partial(self, kind, arguments, answer):
        self.kept.append((kind, tuple(arguments), answer))


@pytest.fixture
def hook(lm):
    before, lm.cache_hook = lm.cache_hook, _Hook()
    yield lm.cache_hook
    lm.cache_hook = before


# -- how the harness finds it -------------------------------------------------------


def test_the_harness_knows_it_by_name(folder, task_folder, lm):
    assert get_model("genlm") is GenlmLM
    assert get_model("hf").__name__ == "HFLM"
    by_name = evaluate(
        "genlm", task_folder, "tiny_choice", model_args=MODEL_ARGS.format(folder), batch_size=1
    )
    by_object = evaluate(lm, task_folder, "tiny_choice")
    assert responses(by_name, "tiny_choice") == responses(by_object, "tiny_choice")
    assert by_name["config"]["genlm_engine"] == "hf"
    assert by_name["config"]["genlm_version"] == genlm.__version__


def test_the_command_evaluates(folder, task_folder, tmp_path, monkeypatch, capsys):
    only = functools.partial(TaskManager, include_defaults=False)  # not the harness's thousands
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("lm_eval", "run", "--model", "genlm", "--model_args", MODEL_ARGS.format(folder)),
            *("--tasks", "tiny_rolling", "--include_path", str(task_folder)),
            *("--output_path", str(tmp_path)),
        ],
    )
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        main()
    finally:
        root.handlers[:], root.level = handlers, level
    assert "tiny_rolling" in capsys.readouterr().out
    [found] = tmp_path.rglob("results*.json")
    results = json.loads(found.read_text())["results"]["tiny_rolling"]
    assert results["word_perplexity,none"] > 1


def test_one_process_evaluates_everything(lm):
    assert (lm.rank, lm.world_size) == (0, 1)


# -- log-likelihoods ----------------------------------------------------------------


def test_answers_of_one_question_are_asked_in_one_call(lm, monkeypatch):
    calls = []
    score = lm.llm.batch_token_scores_sync

    def batch_token_scores_sync(texts, starts, **options):
        calls.append((len(texts), [text[:3] for text in texts]))
        return score(texts, starts, **options)

    monkeypatch.setattr(lm.llm, "batch_token_scores_sync", batch_token_scores_sync)
    monkeypatch.setattr(lm, "texts_at_once", 4)
    questions = ["the fox", "a hill", "upon the woods"]
    asked = [(text, each) for each in documents()[0]["choices"] for text in questions]
    found = lm.loglikelihood(requests("loglikelihood", *asked), disable_tqdm=True)
    assert [count for count, _ in calls] == [4, 4, 4]
    assert all(beginning == starts[0] for _, starts in calls for beginning in starts)
    alone = [lm.loglikelihood(requests("loglikelihood", each))[0] for each in asked]
    assert found == [pytest.approx(each, abs=1e-5) for each in alone]


def test_long_texts_lose_tokens_on_the_left(lm, caplog):
    context, continuation = lm.tok_encode("a fox ran " * 40), lm.tok_encode(" away")
    kept = (context + continuation)[-(lm.max_length + 1) :]
    assert len(kept) < len(context)
    scores = lm.llm.score_sync(kept, len(kept) - len(continuation))
    [(found, _)] = lm._loglikelihood_tokens([(None, context, continuation)])
    assert found == pytest.approx(scores.sum().item(), abs=1e-5)
    assert "1 texts of more than 65 tokens" in caplog.text


def test_a_continuation_beyond_the_context_is_refused(lm):
    with pytest.raises(ValueError, match="65 tokens cannot be scored with max_length=64"):
        lm._loglikelihood_tokens([(None, [1], [5] * 65)])


def test_a_continuation_that_the_tokenizer_joins_with_its_context_is_refused(lm):
    """Its log-probability would be 0, that of the best answer; `hf` refuses it, too."""
    with pytest.raises(ValueError, match=r"'e' cannot be scored: .* the context, 'Onc'"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b"), ("Onc", "e")))


def test_no_text_has_the_log_probability_zero(lm):
    assert lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("",))) == [0.0]
    assert lm.loglikelihood([]) == lm.loglikelihood_rolling([]) == lm.generate_until([]) == []


def test_texts_without_tokens_are_scored(lm):
    pairs = [("", ""), ("", "a"), ("a", ""), ("", ""), (" ", "a"), ("\n", "")]
    found = lm.loglikelihood(requests("loglikelihood", *pairs))
    moved = [lm.llm.score_sync([1, *lm.tok_encode(text)]).sum().item() for text in (" a", "\n")]
    assert found[0] == found[2] == found[3] == (0.0, True)
    assert found[1] == lm.loglikelihood(requests("loglikelihood", ("<s>", "a")))[0]
    assert [total for total, _ in found[4:]] == pytest.approx(moved, abs=1e-5)


def test_a_smaller_max_length_makes_smaller_windows(folder, lm):
    text = "the fox ran through the woods and the hills"
    short = GenlmLM(lm.llm, max_length=4)
    ids = short.tok_encode(text)
    assert len(ids) > 8
    total, first = 0.0, 0
    for last in range(4, len(ids) + 4, 4):
        end = min(last, len(ids))
        window = ([lm.prefix_token_id, *ids] if first == 0 else ids[first - 1 :])[:5]
        if end < last:  # the last window keeps a full context
            window = ids[-5:]
        total += lm.llm.score_sync(window)[-(end - first) :].sum().item()
        first = end
    [found] = short.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert found == pytest.approx(total, abs=1e-4)
    [whole] = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    assert abs(found - whole) > 0.01


def test_the_cache_of_answers_gets_each_answer(lm, hook):
    pairs = [("the", " fox"), ("a", " hill")]
    scores = lm.loglikelihood(requests("loglikelihood", *pairs))
    [total] = lm.loglikelihood_rolling(requests("loglikelihood_rolling", ("the fox",)))
    arguments = {"until": ["e"], "max_gen_toks": 4}
    [text] = lm.generate_until(requests("generate_until", ("the", arguments)))
    assert sorted(hook.kept[:2]) == sorted(
        ("loglikelihood", pair, score) for pair, score in zip(pairs, scores, strict=True)
    )
    assert hook.kept[2:] == [
        ("loglikelihood_rolling", ("the fox",), total),
        ("generate_until", ("the", {"until": ["e"], "max_gen_toks": 4}), text),
    ]


def test_cached_answers_are_not_computed_again(lm, task_folder, tmp_path, monkeypatch):
    cache = str(tmp_path / "answers")
    first = evaluate(lm, task_folder, "tiny_choice", use_cache=cache)
    monkeypatch.setattr(lm.llm, "batch_token_scores_sync", None)
    again = evaluate(lm, task_folder, "tiny_choice", use_cache=cache)
    found, expected = (responses(each, "tiny_choice") for each in (again, first))
    assert found == [[[tuple(pair) for pair in each] for each in doc] for doc in expected]


@pytest.mark.parametrize("hidden", [True, False])
def test_progress_is_shown_unless_it_is_not_wanted(hidden, lm, capfd):
    lm.loglikelihood(requests("loglikelihood", ("the", " fox")), disable_tqdm=hidden)
    lm.generate_until(
        requests("generate_until", ("the", {"max_gen_toks": 1})), disable_tqdm=hidden
    )
    shown = capfd.readouterr().err
    assert ("loglikelihood" in shown) is not hidden
    assert ("1/1" in shown) is not hidden


# -- generation ---------------------------------------------------------------------


def test_more_continuations_than_at_once_are_those_alone(lm, monkeypatch):
    monkeypatch.setattr(lm, "texts_at_once", 2)
    asked = [
        (text, {"until": until, "max_gen_toks": most})
        for text in ("the fox", "a hill", "woods")
        for until, most in (([], 1), (["e"], 12), (["n", " a"], 7))
    ]
    found = lm.generate_until(requests("generate_until", *asked))
    assert found == [lm.generate_until(requests("generate_until", each))[0] for each in asked]


SAMPLED = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12, "until": []}


def test_samples_follow_the_seed_of_torch(lm):
    asked = requests("generate_until", *[("the fox", SAMPLED)] * 3)
    torch.manual_seed(1)
    first = lm.generate_until(asked)
    assert len(set(first)) == 3
    torch.manual_seed(1)
    assert lm.generate_until(asked) == first
    torch.manual_seed(2)
    assert lm.generate_until(asked) != first


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}])
def test_samples_of_the_most_likely_tokens_are_greedy(narrow, lm):
    greedy = {"max_gen_toks": 12, "until": []}
    asked = [("the fox", SAMPLED | narrow), ("the fox", greedy), ("the fox", SAMPLED)]
    sampled, expected, free = lm.generate_until(requests("generate_until", *asked))
    assert sampled == expected != free


def test_sampling_without_do_sample_is_greedy(lm):
    asked = [("a", {"max_gen_toks": 9, "do_sample": False, "temperature": 2.0}), ("a", {})]
    asked[1][1]["max_gen_toks"] = 9
    first, second = lm.generate_until(requests("generate_until", *asked))
    assert first == second


def test_arguments_without_effect_are_accepted_and_others_refused(lm):
    text = ("the", {"max_gen_toks": 2, "num_beams": 1, "repetition_penalty": 1.0})
    lm.generate_until(requests("generate_until", text))
    with pytest.raises(
        ValueError, match=r"\['num_beams', 'suppress_tokens'\] are not supported"
    ):
        lm.generate_until(
            requests("generate_until", ("the", {"num_beams": 4, "suppress_tokens": [3]}))
        )
    for until in ("", ["e", ""]):
        with pytest.raises(ValueError, match=r"until=\[.*''\] has an empty text"):
            lm.generate_until(requests("generate_until", ("the", {"until": until})))


def test_a_context_makes_room_for_what_is_generated(lm, caplog):
    long = "a fox ran " * 40
    arguments = {"max_gen_toks": 60, "until": []}
    [found] = lm.generate_until(requests("generate_until", (long, arguments)))
    context = lm.tok_encode(long)[-4:]
    ids: list[int] = []
    while len(ids) < 60 and (not ids or ids[-1] != lm.eot_token_id):
        ids.append(lm.llm.draw_sync(context + ids, temperature=0).token_id)
    assert found == lm.tok_decode(ids).split("</s>")[0]
    assert "truncated to its last 4" in caplog.text
    with pytest.raises(ValueError, match="max_gen_toks=64 leaves no room"):
        lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 64})))


def test_an_empty_context_is_the_token_before_texts(lm):
    arguments = {"max_gen_toks": 5, "until": []}
    found = lm.generate_until(requests("generate_until", ("", arguments), ("<s>", arguments)))
    assert found[0] == found[1] != ""
    with pytest.raises(ValueError, match="max_gen_toks=0; it must be at least 1"):
        lm.generate_until(requests("generate_until", ("", {"max_gen_toks": 0})))


@pytest.mark.parametrize("as_text", [False, True])
def test_thoughts_are_dropped(as_text, lm):
    arguments = {"max_gen_toks": 12, "until": []}
    [whole] = lm.generate_until(requests("generate_until", ("the fox", arguments)))
    ids = _greedy(lm, "the fox", 12)
    mark = lm.tok_decode([ids[3]]) if as_text else str(ids[3])
    thinking = GenlmLM(lm.llm, think_end_token=mark, enable_thinking=True)
    [answer] = thinking.generate_until(requests("generate_until", ("the fox", arguments)))
    last = len(ids) - 1 - ids[::-1].index(ids[3])
    if as_text:
        assert answer == whole.split(mark)[-1].lstrip()
    else:
        assert answer == lm.tok_decode(ids[last + 1 :]).lstrip()
    assert answer != whole
    with pytest.raises(ValueError, match="requires tasks that generate"):
        thinking.loglikelihood(requests("loglikelihood", ("a", "b")))


def _greedy(lm, text, count):
    ids: list[int] = []
    for _ in range(count):
        ids.append(lm.llm.draw_sync(lm.tok_encode(text) + ids, temperature=0).token_id)
    return ids


def test_ids_that_end_a_text_are_those_of_the_checkpoint(folder, lm, tmp_path):
    [first, *_] = _greedy(lm, "the fox", 1)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = tmp_path / "generation_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"eos_token_id": [2, first]})
    )
    ours = GenlmLM(str(tmp_path), "hf", max_gen_toks=10)
    [found] = ours.generate_until(requests("generate_until", ("the fox", {})))
    ours.close()
    assert found == lm.tok_decode([first])


# -- options ------------------------------------------------------------------------


def test_options_that_contradict_each_other_are_refused(lm):
    with pytest.raises(ValueError, match="max_length=65; the engine takes 1 to 64"):
        GenlmLM(lm.llm, max_length=65)
    with pytest.raises(ValueError, match="requires think_end_token"):
        GenlmLM(lm.llm, enable_thinking=True)
    with pytest.raises(TypeError, match=r"\['dtype'\] cannot be set"):
        GenlmLM(lm.llm, dtype="float32")
    with pytest.raises(TypeError, match=r"\['device', 'max_batch_size'\] cannot be set"):
        GenlmLM(lm.llm, device="cpu", max_batch_size=3)
    nameless = tiny_tokenizer()
    nameless.bos_token = nameless.eos_token = None
    with pytest.raises(ValueError, match="neither a beginning-of-text nor an end-of-text"):
        GenlmLM(lm.llm, tokenizer=nameless)
    assert GenlmLM(lm.llm, tokenizer=nameless, prefix_token_id=5).prefix_token_id == 5
    with pytest.raises(TypeError, match="has no bos_token_id"):
        GenlmLM(lm.llm, tokenizer=lm.tokenizer.backend_tokenizer)


def test_a_loaded_model_and_another_tokenizer(lm, bos_folder):
    ours = GenlmLM(lm.llm, tokenizer=str(bos_folder), prefix_token_id=7)
    assert ours.tok_encode("a fox") == [1, *lm.tok_encode("a fox")]
    assert ours.prefix_token_id == 7
    assert lm.prefix_token_id == 1
    expected = lm.llm.score_sync([7, *lm.tok_encode(" fox")]).sum().item()
    [(found, _)] = ours.loglikelihood(requests("loglikelihood", ("", " fox")))
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_engine_without_a_limit_has_the_harness_default(folder):
    class Unlimited(genlm.AsyncLM):
        max_context = property(lambda self: None, lambda self, value: None)

    from genlm_hf.engine import HFEngine

    with Unlimited(lambda: HFEngine(folder), name="hf") as llm:
        assert GenlmLM(llm).max_length == 2048
