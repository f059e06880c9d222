"""Rows of all prefixes of a text are right however they are read, and not all in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import genlm
from genlm.backend.llm.prefix_rows import PrefixRows, common_text

from .test_adapters import adapters, close  # noqa: F401 - a fixture
from .tiny import SIZE, alone, assert_right, rows_alone

TEXT = [10, 90, 11, 12, 200, 13, 14]
PROMPT = 2


def prefixes(text: list[int], first: int = PROMPT) -> list[list[int]]:
    return [text[:length] for length in range(first, len(text) + 1)]


def read_as_promptedllm_reads(rows: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """What `PromptedLLM.prefix` does with the rows."""
    index = torch.tensor(targets, device=rows.device)
    with torch.no_grad():
        return torch.gather(rows, 1, index.unsqueeze(1))


@pytest.fixture
def no_tables(llm, monkeypatch):
    """The model, for which computing a table is an error."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a table of rows was computed")

    monkeypatch.setattr(genlm.AsyncLM, "batch_next_token_logprobs", refuse)
    monkeypatch.setattr(genlm.AsyncLM, "batch_next_token_logprobs_sync", refuse)
    return llm


def test_the_entries_that_the_next_prefix_adds_are_read_without_a_table(no_tables, model):
    rows = asyncio.run(no_tables.batch_next_token_logprobs(prefixes(TEXT)))
    assert isinstance(rows, PrefixRows)
    for last in (3, 77):
        targets = [*TEXT[PROMPT:], last]
        found = read_as_promptedllm_reads(rows, targets)
        expected = rows_alone(model, prefixes(TEXT)).gather(1, torch.tensor(targets)[:, None])
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert read_as_promptedllm_reads(rows, targets).sum().item() == pytest.approx(
        expected.sum().item(), abs=1e-3
    )


def test_the_table_is_float32_of_the_vocabularys_width_on_the_models_device(no_tables):
    rows = asyncio.run(no_tables.batch_next_token_logprobs(prefixes(TEXT)))
    count = len(TEXT) - PROMPT + 1
    assert rows.shape == rows.size() == (count, len(no_tables.str_vocab)) == (count, SIZE)
    assert (rows.dtype, rows.device) == (torch.float32, no_tables.device)
    assert repr(rows) == f"PrefixRows({count} rows of {SIZE})"
    assert (len(rows), rows.ndim, rows.dim(), rows.numel()) == (count, 2, 2, count * SIZE)


READINGS = {
    "tempered": lambda rows: torch.log_softmax(rows / 0.5, dim=-1),
    "other targets": lambda rows: rows.gather(1, torch.full((len(rows), 1), 5)),
    "several targets": lambda rows: torch.gather(rows, 1, torch.tensor([[3, 4]] * len(rows))),
    "other dimension": lambda rows: torch.gather(rows, 0, torch.tensor([[1] * SIZE])),
    "by keyword": lambda rows: torch.gather(
        rows, dim=1, index=torch.zeros(len(rows), 1).long()
    ),
    "only keywords": lambda rows: torch.logsumexp(input=rows, dim=-1),
    "one row": lambda rows: rows[2],
    "iteration": lambda rows: torch.stack(list(rows)),
    "numpy": lambda rows: torch.from_numpy(np.asarray(rows)),
    "normaliser": lambda rows: rows.logsumexp(-1),
    "concatenation": lambda rows: torch.cat([rows, rows]),
    "to": lambda rows: rows.to(torch.float64),
    "clone": lambda rows: rows.clone(),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_however_else_it_is_read_it_is_the_table(llm, model, read):
    async def main() -> Any:
        return read(await llm.batch_next_token_logprobs(prefixes(TEXT)))

    found = asyncio.run(main())
    assert type(found) is torch.Tensor
    expected = read(rows_alone(model, prefixes(TEXT)))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_entries_that_the_caller_changed_are_gathered(llm):
    rows = asyncio.run(llm.batch_next_token_logprobs(prefixes(TEXT)))
    rows[0] = -5.0
    assert read_as_promptedllm_reads(rows, [*TEXT[PROMPT:], 3])[0] == -5


def test_rows_are_distributions(llm):
    rows = asyncio.run(llm.batch_next_token_logprobs(prefixes(TEXT)))
    torch.testing.assert_close(rows.logsumexp(-1), torch.zeros(len(rows)), atol=1e-4, rtol=0)


def test_a_model_whose_tables_are_read_computes_tables_from_then_on(llm):
    async def asked() -> torch.Tensor:
        return await llm.batch_next_token_logprobs(prefixes(TEXT))

    first = asyncio.run(asked())
    assert isinstance(first, PrefixRows)
    assert (first / 2).shape == first.shape
    assert type(asyncio.run(asked())) is torch.Tensor
    assert (first[1] == first.whole()[1]).all()


def test_each_token_of_a_text_is_computed_once(llm):
    before = llm.statistics().engine["tokens_computed"]
    asyncio.run(llm.batch_next_token_logprobs(prefixes(TEXT)))
    assert llm.statistics().engine["tokens_computed"] - before == len(TEXT)


def test_a_text_that_grows_is_not_scored_again(llm, model):
    text, steps = TEXT[: PROMPT + 3], [5, 6, 7, 8]
    asyncio.run(llm.batch_next_token_logprobs(prefixes(text)))
    computed = []
    for token in steps:
        text = [*text, token]
        before = llm.statistics().engine["tokens_computed"]
        rows = asyncio.run(llm.batch_next_token_logprobs(prefixes(text)))
        computed.append(llm.statistics().engine["tokens_computed"] - before)
        found = read_as_promptedllm_reads(rows, [*text[PROMPT:], 9])[:, 0]
        expected = [alone(model, text[:i])[text[i]] for i in range(PROMPT, len(text))]
        torch.testing.assert_close(found[:-1], torch.stack(expected), atol=1e-4, rtol=0)
    assert max(computed) <= 2


def change_all(llm: Any, factor: float) -> None:
    llm.update_weights({name: factor * w for name, w in llm.model.state_dict().items()})


def change_in_place(llm: Any, factor: float) -> None:
    with torch.no_grad():
        for weight in llm.model.parameters():
            weight.mul_(factor)


@pytest.mark.parametrize("change", [change_all, change_in_place])
def test_a_text_that_grows_is_scored_again_after_a_change_of_the_weights(llm, model, change):
    asyncio.run(llm.batch_next_token_logprobs(prefixes(TEXT)))
    change(llm, 1.5)
    text = [*TEXT, 5]
    rows = asyncio.run(llm.batch_next_token_logprobs(prefixes(text)))
    targets = [*text[PROMPT:], 9]
    expected = rows_alone(model, prefixes(text)).gather(1, torch.tensor(targets)[:, None])
    torch.testing.assert_close(
        read_as_promptedllm_reads(rows, targets), expected, atol=1e-4, rtol=0
    )


def test_an_adapter_has_scores_of_its_own_also_under_a_name_given_again(llm, adapters):  # noqa: F811
    def read(lora_name: str | None) -> torch.Tensor:
        text = prefixes([10, 11, 12, 13, 14], 1)
        rows = asyncio.run(llm.batch_next_token_logprobs(text, lora_name))
        assert isinstance(rows, PrefixRows)
        asyncio.run(llm.batch_next_token_logprobs(text[:-1], lora_name))  # for the next call
        return read_as_promptedllm_reads(rows, [11, 12, 13, 14, 0])

    (red, red_row), (blue, blue_row) = adapters
    base = read(None)
    llm.add_new_lora(red, "one")
    assert close(read("one")[2], red_row[13])
    assert close(read(None), base)
    llm.add_new_lora(blue, "one")
    assert close(read("one")[2], blue_row[13])
    llm.load_lora(red, "one", replace=True)
    assert close(read("one")[2], red_row[13])
    assert not close(red_row[13], blue_row[13])


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [[1]],
        prefixes(TEXT)[:3],
        [[], [1], [1, 2], [1, 2, 3]],
        [[1], [1, 2], [1, 2, 4], [1, 2, 3, 4]],
        [[1], [1, 2], [1, 2, 3], [1, 2, 3]],
        [[4], [3], [2], [1]],
        [[1], (1, 2), [1, 2, 3], [1, 2, 3, 4]],
        [np.array([1] * n) for n in (1, 2, 3, 4)],
    ],
)
def test_other_batches_are_no_prefixes_of_one_text(sequences):
    assert common_text(sequences) is None


def test_lists_and_tuples_that_grow_by_a_token_are():
    assert common_text(prefixes(TEXT)) == (PROMPT, tuple(TEXT))
    assert common_text(tuple(map(tuple, prefixes(TEXT)))) == (PROMPT, tuple(TEXT))


def test_an_invalid_text_has_the_same_errors(llm):
    with pytest.raises(ValueError, match="100000"):
        asyncio.run(llm.batch_next_token_logprobs(prefixes([1, 2, 100000, 3, 4, 5])))
    with pytest.raises(genlm.UnknownAdapterError):
        asyncio.run(llm.batch_next_token_logprobs(prefixes(TEXT), "nobody"))


def test_engines_without_scores_give_tables(model, tokenizer):
    class Plain(genlm.BatchEngine):
        capabilities = frozenset()
        max_context = None
        vocabulary = genlm.plugin.Vocabulary.from_tokenizer(tokenizer)

        def evaluate(self, queries):
            return rows_alone(model, [query.token_ids for query in queries])

    from genlm.backend.llm.served import ServedLM

    with ServedLM(Plain, name="plain") as llm:
        rows = asyncio.run(llm.batch_next_token_logprobs(prefixes(TEXT)))
        assert type(rows) is torch.Tensor
        assert_right(rows, model, *prefixes(TEXT))
