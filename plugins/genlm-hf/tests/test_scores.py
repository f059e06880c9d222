"""Scores of texts against unbatched forward passes in float64, and against rows."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from genlm import AsyncLM, Capability, Query, TokenScores
from genlm_hf.engine import HFEngine

from .families import FAMILIES, family, path_of
from .population import used
from .test_adapters import make_adapter
from .tiny import VOCAB_SIZE, WIDTH, answers, build_model, ids_of_lengths, llama_settings

Ids = Sequence[int]
PATHS = ("packed", "slot_cache", "padded")
SERVED_BY = {
    "llama": "packed",
    "gpt2": "packed",
    "opt": "packed",
    "gemma2": "packed",
    "gemma2 with capped scores": "packed",
    "gemma3_text": "packed",
    "cohere": "packed",
    "granite": "packed",
    "gpt_oss": "packed",
    "mistral with a short window": "packed",
    "gptj": path_of("gptj"),
    "bloom": "slot_cache",
    "falcon": "slot_cache",
    "mamba": "padded",
    "jamba": "padded",
}


def texts_of(*lengths: int) -> list[list[int]]:
    """Random texts, the later of which begin as the first does."""
    first, *suffixes = ids_of_lengths(*lengths)
    return [first, *([*first[:10], *ids[10:]] for ids in suffixes)]


def query(query_id: int, ids: Ids, start: int, adapter: str | None = None) -> Query:
    return Query(query_id, tuple(ids[:-1]), adapter, targets=tuple(ids[start:]))


def scores_of(
    engine: HFEngine, texts: Sequence[Ids], starts: Iterable[int], adapter: str | None = None
) -> list[TokenScores]:
    """Score texts step by step."""
    for query_id, (ids, start) in enumerate(zip(texts, starts, strict=True)):
        engine.submit(query(query_id, ids, start, adapter))
    results: dict[int, Any] = {}
    while len(results) < len(texts):
        for completion in engine.step():
            assert completion.error is None, completion.error
            results[completion.query_id] = completion.result
    return [results[i] for i in range(len(texts))]


def right_scores(model: Any, ids: Ids, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: one pass over one text, log-softmax in float64."""
    fresh = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = fresh(torch.tensor([list(ids[:-1])]), use_cache=False).logits[0, start - 1 :]
    rows = logits[:, :VOCAB_SIZE].double().log_softmax(-1)
    logprobs = rows.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
    return logprobs, logprobs >= rows.amax(-1)


def largest_error(
    model: Any, texts: Sequence[Ids], starts: Iterable[int], results: list[TokenScores]
) -> float:
    errors = []
    for ids, start, scores in zip(texts, starts, results, strict=True):
        logprobs, is_top = right_scores(model, ids, start)
        assert scores.logprobs.dtype == torch.float32
        assert scores.is_top.tolist() == is_top.tolist()
        errors.append((scores.logprobs.double() - logprobs).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", SERVED_BY)
def test_scores_are_right_on_every_execution_path(name: str, tokenizer: Any) -> None:
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer, max_tokens_per_batch=50)
    assert engine.statistics()["execution_path"] == SERVED_BY[name]
    assert Capability.SCORE in engine.capabilities
    texts, starts = texts_of(40, 55, 33, 12, 26, 2, 17), [1, 20, 32, 5, 11, 1, 9]
    for _ in range(2):  # the second time most is cached
        assert largest_error(model, texts, starts, scores_of(engine, texts, starts)) <= 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_scores_are_the_entries_of_rows(llama: Any, tokenizer: Any, path: str) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    texts, starts = texts_of(20, 14, 31), [1, 13, 8]
    for ids, start, scores in zip(texts, starts, scores_of(engine, texts, starts), strict=True):
        rows = answers(engine, [ids[:end] for end in range(start, len(ids))])
        pairs = list(zip(rows, ids[start:], strict=True))
        entries = torch.stack([row[target] for row, target in pairs])
        assert (scores.logprobs - entries).abs().max() <= 1e-4
        assert scores.is_top.tolist() == [bool(row[i] >= row.max()) for row, i in pairs]


@pytest.mark.parametrize("path", PATHS)
def test_the_most_likely_tokens_are_known_as_such(
    llama: Any, tokenizer: Any, path: str
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    ids = [5, 6, 7]
    for _ in range(12):
        ids.append(int(answers(engine, [ids])[0].argmax()))
    [scores] = scores_of(engine, [[*ids, 9]], [1])
    assert scores.is_top[2:-1].all()
    assert largest_error(llama, [[*ids, 9]], [1], [scores]) <= 1e-5


@pytest.mark.parametrize("path", ["packed", "slot_cache"])
def test_every_position_is_computed_once(llama: Any, tokenizer: Any, path: str) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path, self_test=False)
    prompt, *ends = ids_of_lengths(30, *[4] * 6)
    texts = [[*prompt, *end] for end in ends]
    engine.cache_prefix(prompt, None)
    before = used(engine, "tokens_computed")
    results = scores_of(engine, texts, [30] * 6)
    # All but the last token of each, and the last of the prompt again, for its logits.
    assert used(engine, "tokens_computed") == before + 6 * 3 + 1
    assert largest_error(llama, texts, [30] * 6, results) <= 1e-5


def test_one_pass_scores_many_texts(llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer, self_test=False)
    texts = ids_of_lengths(*[40] * 12)
    scores_of(engine, texts, [1] * 12)
    assert used(engine, "forwards") == 1
    assert used(engine, "tokens_computed") == 12 * 39


@pytest.mark.parametrize("path", PATHS)
def test_a_pass_has_a_limited_number_of_logits(
    llama: Any, tokenizer: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    llama.lm_head.register_forward_hook(lambda module, args, out: counts.append(out.shape[1]))
    monkeypatch.setattr("genlm_hf.engine._LOGITS_PER_BATCH_ON_CPU", 25 * WIDTH)
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    texts, starts = texts_of(20, 24, 13, 70), [1, 7, 11, 1]
    counts.clear()
    scores = scores_of(engine, texts, starts)
    assert max(counts) == 25
    assert sum(counts) == sum(map(len, texts)) - sum(starts)
    assert largest_error(llama, texts, starts, scores) <= 1e-5


def test_a_text_longer_than_the_cache_is_scored_without(llama: Any, tokenizer: Any) -> None:
    engine = HFEngine.from_model(llama, tokenizer, kv_budget_bytes=20 * 256)
    texts, starts = ids_of_lengths(50, 12, 9), [3, 4, 1]
    before = used(engine, "contexts_without_cache")
    assert largest_error(llama, texts, starts, scores_of(engine, texts, starts)) <= 1e-5
    assert used(engine, "contexts_without_cache") == before + 1


@pytest.mark.parametrize("path", PATHS)
def test_adapters_apply(base_and_adapters: Any, tokenizer: Any, path: str) -> None:
    base, adapters = base_and_adapters
    engine = HFEngine.from_model(base, tokenizer, execution_path=path)
    texts, starts = texts_of(20, 33, 12), [1, 7, 11]
    for name, (folder, _) in adapters.items():
        engine.add_adapter(name, folder)
    for name, model in [(None, base), *((n, model) for n, (_, model) in adapters.items())]:
        results = scores_of(engine, texts, starts, name)
        assert largest_error(model, texts, starts, results) <= 1e-5


@pytest.fixture(scope="module")
def base_and_adapters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = build_model("llama", **llama_settings())
    adapters = {}
    for seed, (name, layers) in enumerate(
        {"layers": ["q_proj", "down_proj"], "output": ["v_proj", "lm_head"]}.items()
    ):
        folder = tmp_path_factory.mktemp(name)
        model = make_adapter(base, folder, seed, target_modules=layers)
        adapters[name] = (str(folder), model)
    return base, adapters


@pytest.mark.parametrize("path", PATHS)
def test_prepacked_weights_are_used(tokenizer: Any, path: str) -> None:
    wide = {"hidden_size": 272, "intermediate_size": 304, "num_attention_heads": 4}
    wide |= {"num_key_value_heads": 2, "head_dim": 68}
    model = build_model(*family("llama")[:1], **llama_settings(**wide))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    engine = HFEngine.from_model(model, tokenizer, execution_path=path, prepack=True)
    assert used(engine, "prepacked_bytes") > 0
    texts = texts_of(40, 30)
    assert largest_error(model, texts, [1, 3], scores_of(engine, texts, [1, 3])) <= 2e-5
    served = engine._served.model
    assert not [m for m in served.modules() if "forward" in vars(m)]


def test_half_precision_is_as_right_as_its_rows(tokenizer: Any) -> None:
    model = build_model("llama", **llama_settings()).to(torch.bfloat16)
    engine = HFEngine.from_model(model, tokenizer)
    texts, starts = texts_of(20, 33), [1, 7]
    for ids, start, scores in zip(texts, starts, scores_of(engine, texts, starts), strict=True):
        assert (scores.logprobs - right_scores(model, ids, start)[0]).abs().max() <= 0.05


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [350, 400])
def test_ids_without_logits_have_no_probability(path: str, size: int, llama: Any) -> None:
    """Of a tokenizer with more ids than the model has logits."""
    from genlm.testing import tiny_tokenizer

    larger = tiny_tokenizer()
    larger.add_tokens([f"<{i}>" for i in range(size - VOCAB_SIZE)])
    engine = HFEngine.from_model(llama, larger, execution_path=path)
    [ids] = ids_of_lengths(20)
    [scores] = scores_of(engine, [[*ids, size - 1]], [10])
    with torch.no_grad():
        logits = copy.deepcopy(llama).eval()(torch.tensor([ids]), use_cache=False).logits[0, 9:]
    rows = pad(logits.double(), (0, size - WIDTH), value=float("-inf")).log_softmax(-1)
    right = rows.gather(1, torch.tensor([*ids[10:], size - 1])[:, None])[:, 0]
    assert scores.logprobs[-1] == right[-1] == float("-inf")
    assert not scores.is_top[-1]
    assert (scores.logprobs - right)[:-1].abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["llama with dynamic rope", "phi3 with longrope"])
def test_models_whose_rows_depend_on_the_length_are_scored_by_rows(
    name: str, tokenizer: Any
) -> None:
    model_type, settings = FAMILIES[name]
    model = build_model(model_type, **settings)
    engine = HFEngine.from_model(model, tokenizer)
    assert engine.statistics()["execution_path"] == "padded"
    texts, starts = ids_of_lengths(40, 30), [20, 5]
    for ids, start, scores in zip(texts, starts, scores_of(engine, texts, starts), strict=True):
        right = [right_scores(model, ids[: end + 1], end)[0] for end in range(start, len(ids))]
        assert (scores.logprobs - torch.cat(right)).abs().max() <= 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_what_raises_leaves_the_model_as_it_was(
    llama: Any, tokenizer: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFEngine.from_model(llama, tokenizer, execution_path=path)
    texts, starts = texts_of(30, 20), [1, 2]
    scores_of(engine, texts, starts)
    served = engine._served.model

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("genlm.prefix.rows.PieceScores.add", broken)
        engine.submit(query(0, ids_of_lengths(25)[0], 1))
        [completion] = engine.step()
        assert "out of memory" in str(completion.error)
    assert not [m for m in served.modules() if "forward" in vars(m)]
    assert largest_error(llama, texts, starts, scores_of(engine, texts, starts)) <= 1e-5


def test_one_text_that_overflows_fails_alone(llama: Any, tokenizer: Any) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight[77] = float("nan")
    engine = HFEngine.from_model(llama, tokenizer)
    good, bad = ids_of_lengths(20, 20)
    good, bad = [i if i != 77 else 78 for i in good], [*bad[:10], 77, *bad[11:]]
    for query_id, ids in enumerate((good, bad, good[:-2])):
        engine.submit(query(query_id, ids, 1))
    by_query_id = {completion.query_id: completion for completion in engine.step()}
    assert "not distributions" in str(by_query_id[1].error)
    errors = [by_query_id[0].error, by_query_id[2].error]
    assert errors == [None, None]


# -- steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_step_is_one_pass_of_one_kind(llama: Any, tokenizer: Any, path: str) -> None:
    engine = HFEngine.from_model(
        llama, tokenizer, execution_path=path, max_tokens_per_batch=100, self_test=False
    )
    contexts = ids_of_lengths(*[31] * 8)
    for query_id, ids in enumerate(contexts):
        request = query(query_id, ids, 1) if query_id % 2 else Query(query_id, tuple(ids))
        engine.submit(request)
    steps = []
    for _ in range(4):
        before = used(engine, "forwards")
        steps.append(sorted(completion.query_id for completion in engine.step()))
        assert used(engine, "forwards") == before + 1
    assert steps == [[0, 2, 4], [1, 3, 5], [6], [7]]


@pytest.mark.parametrize("path", PATHS)
def test_a_text_aborted_between_steps_is_never_computed(
    llama: Any, tokenizer: Any, path: str
) -> None:
    engine = HFEngine.from_model(
        llama, tokenizer, execution_path=path, max_tokens_per_batch=100, self_test=False
    )
    before = used(engine, "tokens_computed")
    for query_id, ids in enumerate(ids_of_lengths(*[31] * 8)):
        engine.submit(query(query_id, ids, 1))
    assert len(engine.step()) == 3
    scored = used(engine, "tokens_computed")
    for query_id in range(3, 8):
        engine.abort(query_id)
    assert engine.step() == []
    assert scored - before == 3 * 30
    assert used(engine, "tokens_computed") == scored


def test_callers_get_what_a_loop_over_rows_gives(folder: Path) -> None:
    async def scores(llm: AsyncLM, texts: list[list[int]]) -> list[Any]:
        cancelled = asyncio.ensure_future(llm.score(ids_of_lengths(60)[0]))
        waiting = asyncio.ensure_future(llm.batch_score(texts, [1, 5, 9]))
        await asyncio.sleep(0)
        cancelled.cancel()
        return await waiting

    from genlm import load_model

    texts = texts_of(30, 20, 15)
    with load_model(folder, "hf", device="cpu", dtype="float32") as llm:
        results = asyncio.run(scores(llm, texts))
        for ids, start, logprobs in zip(texts, [1, 5, 9], results, strict=True):
            rows = llm.batch_next_token_logprobs_sync(
                [ids[:end] for end in range(start, len(ids))]
            )
            entries = rows.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
            assert (logprobs - entries).abs().max() <= 1e-4
