"""What vLLM computes on a GPU: both model runners, CUDA graphs, worker processes, adapters.

Rows are compared with transformers' unbatched forward pass in float32. The model computes in
bfloat16, for which vLLM has its fast attention kernels. With `GENLM_TEST_DEVICE=cpu` the tests
run on the CPU in float32, with the runner of the environment and without graphs, which tests
the tests.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import genlm
from genlm.testing import TINY_LLAMA, TINY_VOCABULARY, TinyModel
from genlm_vllm.engine import VLLMEngine

DEVICE = os.environ.get("GENLM_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::genlm.UnverifiedModelWarning"),
]

EAGER = {"enforce_eager": True}
GRAPHS = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "kernel_config": {"enable_jit_warmup": False},  # half a minute
}
ADAPTERS = {"enable_lora": True, "max_loras": 2, **EAGER}
FIRST = ", first runner"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": {"engine_opts": EAGER, "unverified": "refuse"},  # rows are compared when it loads
    f"eager{FIRST}": {"engine_opts": EAGER},
    "graphs": {"engine_opts": GRAPHS},
    f"graphs{FIRST}": {"engine_opts": GRAPHS},
    "adapters": {"engine_opts": ADAPTERS},
    f"adapters{FIRST}": {"engine_opts": ADAPTERS},
    "own process": {"engine_opts": EAGER, "multiprocess": True},
}
if DEVICE == "cpu":
    CONFIGURATIONS = {
        name: CONFIGURATIONS[name] for name in ("eager", "adapters", "own process")
    }
WITH_ADAPTERS = [name for name in CONFIGURATIONS if name.startswith("adapters")]

PLACES = 128
"""Maximum number of requests of a step."""

DTYPE = "float32" if DEVICE == "cpu" else "bfloat16"
LARGEST_ERROR, LARGEST_KL = (1e-4, 1e-6) if DEVICE == "cpu" else (0.4, 5e-3)
"""Of a row: of a log-probability, and the divergence from the oracle's row. Other rows of the
model differ by 1 and more."""

Ids = list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    settings = {**TINY_LLAMA, **sizes, **heads, "max_position_embeddings": 1024}
    lora = {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 1}
    folder = tmp_path_factory.mktemp("models") / "llama"
    return TinyModel(folder, settings, adapters=("red", "blue"), lora=lora, scale=0.06)


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def llm(request: pytest.FixtureRequest, model: TinyModel) -> Iterator[genlm.AsyncLM]:
    options = dict(CONFIGURATIONS[request.param])
    options["engine_opts"] = {
        "dtype": DTYPE,
        "max_num_seqs": PLACES,
        "kv_cache_memory_bytes": 2**28,
        **({"gpu_memory_utilization": 0.1} if HAS_GPU else {}),  # share that must be free
        **options["engine_opts"],
    }
    with pytest.MonkeyPatch.context() as environment:
        if request.param.endswith(FIRST):
            environment.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        build = lambda: VLLMEngine(model.path, **options)  # noqa: E731
        with genlm.AsyncLM(build, output_cache=genlm.OutputCache(0)) as llm:
            for name in model.adapters if "enable_lora" in options["engine_opts"] else ():
                llm.load_lora(model.adapters[name], name)
            yield llm


def prompts(*lengths: int) -> list[Ids]:
    generator = random.Random(1)
    return [[generator.randrange(3, TINY_VOCABULARY) for _ in range(n)] for n in lengths]


def check(model: TinyModel, sequences: Any, rows: Any, adapter: str | None = None) -> None:
    for ids, row in zip(sequences, rows, strict=True):
        expected = model.logprobs(tuple(ids), adapter)
        difference = expected - row.cpu()
        assert float(difference.abs().max()) <= LARGEST_ERROR
        assert float((expected.exp() * difference).sum()) <= LARGEST_KL


def check_members(model: TinyModel, members: genlm.Population, **options: Any) -> None:
    """Compare the rows of a population."""
    rows = members.next_token_logprobs_sync()
    check(model, [context.token_ids for context in members], rows, **options)


def statistics(llm: genlm.AsyncLM) -> Any:
    return llm.statistics().engine


def test_the_engine_is_the_one_meant(
    llm: genlm.AsyncLM, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["llm"]
    assert statistics(llm)["dtype"] == DTYPE
    assert statistics(llm)["processes"] == ("own" if name == "own process" else "this")
    engine: Any = llm.engine
    if name != "own process" and DEVICE != "cpu":
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        module = "gpu_model_runner" if name.endswith(FIRST) else "gpu.model_runner"
        assert type(runner).__module__ == f"vllm.v1.worker.{module}"
        graphs = engine.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert graphs.name == ("FULL_DECODE_ONLY" if name.startswith("graphs") else "NONE")


def test_rows_of_prompts_and_of_cached_prompts(llm: genlm.AsyncLM, model: TinyModel) -> None:
    sequences = prompts(1, 7, 16, 40, 70, 300)
    for _ in range(2):
        rows = llm.batch_next_token_logprobs_sync(sequences)
        check(model, sequences, rows)
        on = "cpu" if statistics(llm)["processes"] == "own" else DEVICE
        assert all(row.device.type == on and row.dtype == torch.float32 for row in rows)


def test_contexts_grow(llm: genlm.AsyncLM, model: TinyModel) -> None:
    before = statistics(llm)["contexts_continued"]

    async def run() -> None:
        parent = llm.context(prompts(40)[0])
        await parent.next_token_logprobs()
        contexts = [parent.extend([10 + i, 20 + i][: 1 + i % 2]) for i in range(12)]
        for step in range(20):
            rows = await asyncio.gather(*(each.next_token_logprobs() for each in contexts))
            if step % 6 == 1:
                check(model, [each.token_ids for each in contexts], rows)
            contexts = [
                each.extend((step * 7 + i) % 200 + 3) for i, each in enumerate(contexts)
            ]

    asyncio.run(run())
    assert statistics(llm)["contexts_continued"] - before >= 12 * 19


def test_a_resampled_population(llm: genlm.AsyncLM, model: TinyModel) -> None:
    generator, before = np.random.default_rng(0), statistics(llm)
    members = llm.population(prompts(40)[0], 50)
    for step in range(24):
        members = members.extend(members.draw_sync(seed=step).token_ids)
        if step % 4 == 3:
            members = members[np.sort(generator.integers(0, 50, 50))]
    check_members(model, members[:8])
    assert statistics(llm)["members_forked"] - before["members_forked"] >= 49
    assert statistics(llm)["members_continued"] - before["members_continued"] >= 600


def test_forks_copy_a_block_that_is_not_full(llm: genlm.AsyncLM, model: TinyModel) -> None:
    sampled = llm.population(prompts(70)[0], 30).sample_sync(16, stop=(), seed=3)
    check_members(model, sampled.population[:10])


class TwoLargest(genlm.GroupReduction):
    """The two largest log-probabilities of each member."""

    def compute(
        self, rows: torch.Tensor, row_of: torch.Tensor, members: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del members
        return tuple(rows.topk(2).values[row_of.to(rows.device)].T)


def test_reductions_are_those_of_the_rows(llm: genlm.AsyncLM, model: TinyModel) -> None:
    count = 20
    members = llm.population(prompts(7)[0], count).extend(np.arange(count) + 5)
    rows = members.next_token_logprobs_sync().cpu()
    check(model, [context.token_ids for context in members], rows)
    allowed = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    mass = rows.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    drawn = members.draw_sync(allowed, seed=1)
    token_ids = drawn.token_ids.cpu()
    assert allowed[torch.arange(count), token_ids].all()
    of_drawn = rows.gather(1, token_ids[:, None])[:, 0]
    best = rows.topk(3)
    found = members.top_tokens_sync(3)
    for name, value, expected in (
        ("mass", members.log_mass_sync(allowed), mass),
        ("mass of a draw", drawn.log_mass, mass),
        ("draw", drawn.logprobs, of_drawn),
        ("tokens", members.token_logprobs_sync(token_ids), of_drawn),
        ("top", found.logprobs, best.values),
        ("user", torch.stack(members.reduce_sync(TwoLargest()), 1), best.values[:, :2]),
    ):
        torch.testing.assert_close(value.cpu(), expected, rtol=0, atol=1e-4, msg=name)


def test_scores_of_texts(llm: genlm.AsyncLM, model: TinyModel) -> None:
    texts = prompts(7, 16, 40, 70, 300)
    for ids, scores in zip(texts, llm.batch_score_sync(texts), strict=True):
        rows = model.all_logprobs(ids[:-1])
        expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found = scores.cpu()[-len(expected) :]
        assert float((found - expected).abs().max()) <= LARGEST_ERROR


def test_more_prompts_than_places(llm: genlm.AsyncLM, model: TinyModel) -> None:
    sequences = prompts(*(1 + i % 37 for i in range(3 * PLACES)))
    rows = llm.batch_next_token_logprobs_sync(sequences)
    check(model, sequences[::32], rows[::32])


@pytest.mark.parametrize("llm", WITH_ADAPTERS, indirect=True)
def test_adapters_have_their_own_rows(llm: genlm.AsyncLM, model: TinyModel) -> None:
    sequences = prompts(1, 7, 16, 40)

    async def rows_of(names: Sequence[str | None]) -> list[Any]:
        return await asyncio.gather(
            *(
                llm.next_token_logprobs(ids, lora_name=name)
                for name in names
                for ids in sequences
            )
        )

    names = (None, "red", "blue")
    rows = asyncio.run(rows_of(names))
    for place, name in enumerate(names):
        check(model, sequences, rows[place * 4 : place * 4 + 4], name)
        members = llm.population(prompts(40)[0], 6, lora_name=name)
        for step in range(4):
            members = members.extend(members.draw_sync(seed=step).token_ids)[[0, 0, 1, 2, 3, 5]]
        check_members(model, members, adapter=name)
