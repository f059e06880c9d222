"""How fast are scores and draws, compared with transferring rows?

The Llama of 31 million parameters with random weights on a CPU, float32, with 8,000 and 128,000
ids. The limit is the model's linear layers, including the output embedding.

- scores: `batch_score` of 16 texts of 200 tokens by `genlm-hf`, against one padded forward pass
  of transformers over the same texts, whose hidden states go through the output embedding,
  log-softmax and gather a mebibyte of logits at a time. Texts are new in every round.
- memory: memory of a process in addition to the loaded model to score them with 128,000 ids, in
  passes of 512 tokens and with 16 MiB for keys and values. In a separate process.
- step: 50 contexts are extended by a token, which is drawn under a different mask each: with
  `draw`, against rows and the same computation by the caller, for each row or for all of them
  at once. Time outside the model's forward pass. 128,000 ids.

The ratio is that to the fastest peer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from particle_model import llama, tokenizer
from report import print_report

from genlm import AsyncLM, Mask, OutputCache
from genlm_hf.engine import HFEngine

TEXTS, TOKENS, PARTICLES = 16, 200, 50
WIDE = 128_000

# The peer's logits at a time, 1 MiB in float32: fewer or more take longer.
_LOGITS_AT_ONCE = 2**18


def served(model: Any, vocab_size: int, **options: Any) -> AsyncLM:
    """The model on `genlm-hf`, without an output cache."""
    return AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer(vocab_size), prepack=True, **options),
        output_cache=OutputCache(0),
    )


def texts_of(seed: int, vocab_size: int) -> list[list[int]]:
    """Random texts."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(TOKENS)] for _ in range(TEXTS)]


def padded_scores(model: Any, texts: list[list[int]], logits_at_once: int) -> torch.Tensor:
    """The peer: one pass over all texts, then log-softmax and gather in pieces."""
    ids = torch.tensor(texts)
    with torch.inference_mode():
        states = model.model(ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        targets = ids[:, 1:].flatten()[:, None]
        step = max(1, logits_at_once // model.config.vocab_size)
        parts = [
            model.lm_head(part).log_softmax(-1).gather(1, chosen)
            for part, chosen in zip(states.split(step), targets.split(step), strict=True)
        ]
    return torch.cat(parts).view(len(texts), -1)


def scores(rounds: int, vocab_size: int) -> dict[str, list[float]]:
    """Milliseconds for all texts, by contestant."""
    model = llama(vocab_size)
    samples: dict[str, list[float]] = {}
    with served(model, vocab_size) as llm:
        contestants: dict[str, Callable[[list[list[int]]], Any]] = {
            "padded pass": lambda texts: padded_scores(model, texts, _LOGITS_AT_ONCE),
            "padded pass, larger pieces": lambda texts: padded_scores(model, texts, 2**22),
            "batch_score": llm.batch_score_sync,
        }
        for seed in range(rounds + 1):
            texts = texts_of(seed, vocab_size)
            found = {}
            for name, run in contestants.items():
                start = time.perf_counter()
                found[name] = run(texts)
                if seed:  # the first round warms up
                    elapsed = (time.perf_counter() - start) * 1e3
                    samples.setdefault(f"scores, V={vocab_size} {name}", []).append(elapsed)
            error = (torch.stack(found["batch_score"]) - found["padded pass"]).abs().max()
            assert error <= 1e-4, error
    return samples


def memory() -> float:
    """MiB that scoring needs beyond the loaded model: the growth of the peak."""
    llm = served(llama(WIDE), WIDE, max_tokens_per_batch=512, kv_budget_bytes=2**24)
    with llm:
        llm.next_token_logprobs_sync([1, 2, 3])
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
        before = resident_bytes("VmHWM")
        llm.batch_score_sync(texts_of(0, WIDE))
        return (resident_bytes("VmHWM") - before) / 2**20


def resident_bytes(name: str) -> int:
    """A size in the status of this process."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


@contextmanager
def timed(model: Any) -> Iterator[list[float]]:
    """Collect the seconds of each forward pass of a model."""
    starts: list[float] = []
    seconds: list[float] = []
    handles = [
        model.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())),
        model.register_forward_hook(
            lambda *_: seconds.append(time.perf_counter() - starts.pop())
        ),
    ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def masks(vocab_size: int) -> list[torch.Tensor]:
    """A mask for each particle, of half of all ids."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.rand(PARTICLES, vocab_size, generator=generator) < 0.5)


async def drawn(llm: AsyncLM, contexts: list[Any], allowed: list[Any]) -> list[Any]:
    """A token for each context, and its mask's log mass."""
    return await asyncio.gather(*(llm.draw(*each) for each in zip(contexts, allowed)))


async def drawn_by_the_caller(
    llm: AsyncLM, contexts: list[Any], allowed: list[Any]
) -> list[Any]:
    """The same from rows."""
    return await asyncio.gather(*(_from_row(llm, *each) for each in zip(contexts, allowed)))


async def _from_row(llm: AsyncLM, context: Any, allowed: torch.Tensor) -> tuple[int, float]:
    row = (await llm.next_token_logprobs(context)).masked_fill(~allowed, float("-inf"))
    mass = row.logsumexp(0)
    return int(torch.multinomial((row - mass).exp(), 1)), float(mass)


async def drawn_together(llm: AsyncLM, contexts: list[Any], allowed: torch.Tensor) -> Any:
    """The same from all rows at once."""
    rows = (await llm.batch_next_token_logprobs(contexts)).masked_fill(~allowed, float("-inf"))
    masses = rows.logsumexp(-1)
    return torch.multinomial((rows - masses[:, None]).exp(), 1)[:, 0].tolist(), masses.tolist()


def step(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step outside the model, by contestant."""
    model = llama(WIDE)
    samples: dict[str, list[float]] = {}
    booleans = masks(WIDE)
    allowed, together = [Mask(mask, WIDE) for mask in booleans], torch.stack(booleans)
    contestants: dict[str, Any] = {
        "rows one by one": lambda llm, contexts: drawn_by_the_caller(llm, contexts, booleans),
        "rows": lambda llm, contexts: drawn_together(llm, contexts, together),
        "draw": lambda llm, contexts: drawn(llm, contexts, allowed),
    }
    with timed(model) as seconds, served(model, WIDE) as llm:
        for name, run in contestants.items():
            generator = random.Random(0)
            contexts = [llm.context([1, 2, 3, i]) for i in range(PARTICLES)]
            for index in range(rounds + 2):
                seconds.clear()
                start = time.perf_counter()
                asyncio.run(run(llm, contexts))
                outside = time.perf_counter() - start - sum(seconds)
                if index > 1:  # the first are prompts
                    samples.setdefault(f"step outside the model, {name}", []).append(
                        outside * 1e3
                    )
                contexts = [each.extend([generator.randrange(WIDE)]) for each in contexts]
    return samples


def ratios(samples: dict[str, list[float]]) -> dict[str, float]:
    """How each contestant of ours compares with its peer."""
    medians = {row: statistics.median(values) for row, values in samples.items()}
    found = {}
    for row, value in medians.items():
        for ours, peer in (("batch_score", "padded pass"), ("draw", "rows")):
            if row.endswith(ours):
                case = row.removesuffix(ours) + peer
                peers = [other for name, other in medians.items() if name.startswith(case)]
                found[row] = value / min(peers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["scores", "memory", "step"])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_memory:
        print(memory())
        return
    samples: dict[str, list[float]] = {}
    if "scores" in options.parts:
        samples |= scores(options.rounds, 8_000)
        samples |= scores(max(1, options.rounds // 3), WIDE)
    if "step" in options.parts:
        samples |= step(options.rounds)
    extra: dict[str, Any] = {"rounds": options.rounds}
    if "memory" in options.parts:
        command = [sys.executable, __file__, "--only-memory"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        extra["memory_mib"] = round(float(done.stdout.split()[-1]), 1)
        print(f"memory above the model with V={WIDE}: {extra['memory_mib']} MiB")
    if samples:
        print_report("scores", samples, unit="ms", ratios=ratios(samples), extra=extra)


if __name__ == "__main__":
    main()
