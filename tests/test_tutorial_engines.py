"""The engines of the tutorial for authors of plugins pass the checks that it names."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from documents import blocks

from genlm import AsyncLM, Capability, Token, Vocabulary, prefix, rows_from_logits
from genlm.plugin import BatchEngine, Completion, GroupValues, check_query
from genlm.testing import Case, EngineTarget, all_checks, run_case

TUTORIAL = "docs/plugins/writing-a-plugin.md"
SIZE = 6
WEIGHTS = torch.from_numpy(np.random.default_rng(0).normal(size=(SIZE, SIZE)))


def vocabulary() -> Vocabulary:
    tokens = [Token(i, bytes([97 + i])) for i in range(SIZE)]
    return Vocabulary(None, tokens, [repr(token) for token in tokens])


def logits_of(token_ids: Sequence[int]) -> torch.Tensor:
    """The closed form: a sum over the tokens, discounted by their age; float64."""
    return sum(0.7**age * WEIGHTS[i] for age, i in enumerate(reversed(token_ids)))


def oracle(token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
    return logits_of(token_ids).log_softmax(-1)


def snippet(containing: str) -> str:
    [source] = [
        block for block in [*blocks(TUTORIAL, "py"), *blocks(TUTORIAL)] if containing in block
    ]
    return source


def members(source: str, **names: object) -> dict[str, object]:
    """The functions and classes that a block defines."""
    namespace: dict[str, object] = dict(names)
    exec("from __future__ import annotations\n" + source, namespace)
    return namespace


class Recurrent(BatchEngine):
    """The methods that the blocks about states use."""

    def __init__(self) -> None:
        self.vocabulary = vocabulary()
        self.states: dict[object, torch.Tensor] = {}
        self.prefilled = 0

    def evaluate(self, queries):
        states = [self.state_of(query.sequence, query.adapter) for query in queries]
        return rows_from_logits(self.logits(torch.stack(states)), self.vocabulary)

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        self.prefilled += len(token_ids)
        return logits_of(token_ids)

    def extend(self, state: torch.Tensor, token_id: int) -> torch.Tensor:
        return 0.7 * state + WEIGHTS[token_id]

    def advance(self, states: torch.Tensor, token_ids) -> torch.Tensor:
        return 0.7 * states + WEIGHTS[torch.from_numpy(token_ids)]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states


def with_contexts() -> type[Recurrent]:
    state_of = members(snippet("prefix_key"))["state_of"]
    return type("WithContexts", (Recurrent,), {"state_of": state_of})


def with_generations() -> type[Recurrent]:
    defined = members(snippet("generation.root"), np=np, torch=torch, GroupValues=GroupValues)
    methods = {name: defined[name] for name in ("evaluate_groups", "group_states")}
    return type("WithGenerations", (with_contexts(),), methods)


class Server:
    """A server whose thread returns the logits of each query when they are computed."""

    def __init__(self, model: str) -> None:
        self.vocabulary = vocabulary()
        self.results: queue.SimpleQueue = queue.SimpleQueue()
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, query_id: int, token_ids: Sequence[int]) -> None:
        self._requests.put((query_id, token_ids))

    def cancel(self, query_id: int) -> None:
        """Results of cancelled queries are ignored."""

    def stop(self) -> None:
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            query_id, token_ids = request
            self.results.put([(query_id, logits_of(token_ids))])


class Decoder(torch.nn.Module):
    """The model of the block about keys and values, in float32: two layers, one head."""

    layers, width = 2, 8

    def __init__(self) -> None:
        super().__init__()
        draws = np.random.default_rng(1)

        def weights(*shape: int) -> torch.Tensor:
            return torch.from_numpy(draws.normal(scale=0.5, size=shape)).float()

        self.embeddings = weights(SIZE, self.width)
        self.projections = weights(self.layers, self.width, 3 * self.width)
        self.output = weights(self.width, SIZE)

    def forward(self, ids, positions, attend):
        hidden = self.embeddings[ids] + (positions[..., None] / torch.arange(1, 9)).sin()
        for layer, projection in enumerate(self.projections):
            hidden = hidden + attend(layer, *(hidden @ projection).chunk(3, dim=-1))
        return hidden

    def head(self, hidden):
        return hidden @ self.output


def with_slots() -> type[BatchEngine]:
    names = {
        **{name: getattr(prefix, name) for name in prefix.__all__},
        "load": lambda _: (Decoder(), vocabulary()),
        "logging": logging,
        "np": np,
        "pad_sequence": torch.nn.utils.rnn.pad_sequence,
        "scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention,
        "torch": torch,
    }
    return members(snippet("class DecoderEngine"), **names)["DecoderEngine"]


def decoder_oracle(token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
    """One sequence at a time, with attention in float64."""

    def attend(layer, queries, keys, values):
        scores = (queries @ keys.T).double() / Decoder.width**0.5
        is_later = torch.ones(scores.shape, dtype=torch.bool).triu(1)
        return (scores.masked_fill(is_later, -torch.inf).softmax(-1) @ values.double()).float()

    model, ids = Decoder(), torch.tensor(token_ids)
    return model.head(model(ids, torch.arange(len(ids)), attend)[-1]).log_softmax(-1)


def with_a_loop() -> type:
    names = {
        "Capability": Capability,
        "Completion": Completion,
        "Server": Server,
        "check_query": check_query,
        "rows_from_logits": rows_from_logits,
    }
    return members(snippet("class ServerEngine"), **names)["ServerEngine"]


ENGINES = {
    "contexts": with_contexts,
    "generations": with_generations,
    "loop": lambda: lambda: with_a_loop()("model"),
    "slots": lambda: lambda **options: with_slots()("model", **options),
}
ORACLES = {"slots": decoder_oracle}
TIGHT = {"slots": [{"kv_budget_bytes": 4 * 128}, {"kv_budget_bytes": 16 * 128}]}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_the_tutorial_passes_every_check(name: str) -> None:
    target = EngineTarget(
        model=name,
        build=ENGINES[name](),
        oracle=ORACLES.get(name, oracle),
        max_length=8,
        tight_options=TIGHT.get(name, ()),
    )
    outcomes = [run_case(Case(check, target)) for check in all_checks("engine")]
    assert not [each for each in outcomes if each.status == "failed"]


@pytest.mark.parametrize("name", ["contexts", "generations"])
def test_an_engine_of_the_tutorial_scores_a_text_in_one_prefill_and_one_step_a_token(
    name: str,
) -> None:
    engines: list[Recurrent] = []

    def build() -> Recurrent:
        engines.append(ENGINES[name]()())
        return engines[0]

    with AsyncLM(build) as llm:
        llm.score_sync([0, 1, 2, 3, 4, 5] * 50)
    assert engines[0].prefilled == 1


def test_the_engine_of_the_tutorial_with_slots_passes_its_self_test() -> None:
    engine = with_slots()("model")
    assert engine.statistics()["execution_path_reason"] == "the fastest"
    assert engine.capabilities == {Capability.PREFIX_CACHE, Capability.SCORE}
