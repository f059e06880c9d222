"""How fast are the programs of `examples/`, compared with common implementations?

The programs run as they are, on `genlm-hf` with prepacked weights (`--no-prepack` for without),
beside peers in plain transformers on the same model, the Llama of 31 million parameters with
random weights, float32. The limit is the time of the linear layers over each new token once.

- beams: `beam_search` against `generate(num_beams=...)`, both with as many beams returned.
- power: `power_smc` against the loop of the paper in transformers: `[N, 1]` decoding with
  a cache for every particle, which resampling reorders.
- reward: `reward_smc`, whose reward is the log-probability under another prompt, against
  requests to an endpoint that keeps nothing between them: each block generates after a prefill
  of all tokens so far, and scores whole texts. The requests of a block are one batch.
- distil: the divergence of a student from a teacher at each position of a text, against the
  logits of both in memory. 32,000 ids; each contestant in a process of its own, which also
  tells the growth of its peak memory.

All contestants run in turn in every round. Figures are the CPU time of the whole process
(`--clock wall` for elapsed time); the ratio is the peer's time by the program's in the same
round, the median over rounds. Results that are not random are compared.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_scores import resident_bytes
from particle_model import llama, prompt_of, tokenizer
from particle_population import CLOCKS, Clock
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache
from genlm.smc import resampled
from genlm_hf.engine import HFEngine

PROMPT, ALPHA, PARTICLES, BLOCK = 64, 4.0, 32, 16
DISTIL_VOCABULARY = 32_000
Contestants = dict[str, Callable[[], Any]]


def program(name: str) -> Any:
    """The functions of a program of `examples/`."""
    folder = Path(__file__).parents[1] / "examples"
    return runpy.run_path(str(folder / f"{name}.py"))


def served(model: Any, vocab_size: int, **options: Any) -> AsyncLM:
    """The model on `genlm-hf`, without an output cache."""
    return AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer(vocab_size), **options),
        output_cache=OutputCache(0),
    )


def seconds(run: Callable[[], Any], clock: Clock) -> float:
    """The time of a call."""
    start = clock()
    run()
    return clock() - start


# -- beams ------------------------------------------------------------------------------


def generated(model: Any, width: int, tokens: int) -> torch.Tensor:
    """The scores of the beams of transformers, best first."""
    found = model.generate(
        torch.tensor([prompt_of(PROMPT)]),
        attention_mask=torch.ones(1, PROMPT, dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        length_penalty=0.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return found.sequences_scores


def beams(model: Any, llm: AsyncLM, width: int, tokens: int) -> Contestants:
    """One search by each."""
    beam_search = program("beam_search")["beam_search"]
    prompt = prompt_of(PROMPT)
    contestants: Contestants = {
        "transformers": lambda: generated(model, width, tokens),
        "program": lambda: beam_search(llm, prompt, width, max_tokens=tokens)[1],
    }
    if width <= 100:
        peer, own = (run() for run in contestants.values())
        torch.testing.assert_close(own.float(), peer.float(), rtol=0, atol=1e-3)
    return contestants


# -- particles --------------------------------------------------------------------------


@torch.inference_mode()
def power_by_hand(model: Any, tokens: int) -> np.ndarray:
    """Power-SMC in transformers: returns log-weights."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    past = transformers.DynamicCache(config=model.config)
    logits = model(torch.tensor([prompt_of(PROMPT)]), past_key_values=past).logits[:, -1]
    past.batch_repeat_interleave(PARTICLES)
    logits, log_weights = logits.expand(PARTICLES, -1), np.zeros(PARTICLES)
    for step in range(tokens):
        rows = logits.float().log_softmax(-1)
        proposal = (ALPHA * rows).log_softmax(-1)
        drawn = torch.multinomial(proposal.exp(), 1, generator=generator)
        gains = ALPHA * rows.gather(1, drawn) - proposal.gather(1, drawn)
        log_weights = log_weights + gains[:, 0].double().numpy()
        if step + 1 < tokens:
            ancestors, log_weights = resampled(log_weights, rng.random())
            if (ancestors != np.arange(PARTICLES)).any():
                past.reorder_cache(torch.from_numpy(ancestors))
                drawn = drawn[ancestors]
            logits = model(drawn, past_key_values=past, use_cache=True).logits[:, -1]
    return log_weights


def power(model: Any, llm: AsyncLM, tokens: int) -> Contestants:
    """One filter by each."""
    power_smc = program("power_smc")["power_smc"]
    arguments = {"alpha": ALPHA, "max_tokens": tokens}
    return {
        "transformers": lambda: power_by_hand(model, tokens),
        "program": lambda: power_smc(llm, prompt_of(PROMPT), PARTICLES, **arguments),
    }


@torch.inference_mode()
def reward_from_scratch(model: Any, judge: list[int], blocks: int) -> np.ndarray:
    """Blocks of tokens by requests that keep nothing: returns log-weights."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    prompt = torch.tensor([prompt_of(PROMPT)] * PARTICLES)
    judged = torch.tensor([judge] * PARTICLES)
    text = prompt.new_empty(PARTICLES, 0)
    log_weights, known = np.zeros(PARTICLES), np.zeros(PARTICLES)
    for _ in range(blocks):
        ancestors, log_weights = resampled(log_weights, rng.random())
        text, known = text[ancestors], known[ancestors]
        past = transformers.DynamicCache(config=model.config)
        new = torch.cat([prompt, text], 1)
        for _ in range(BLOCK):
            logits = model(new, past_key_values=past, logits_to_keep=1).logits[:, -1]
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            text = torch.cat([text, new], 1)
        whole = torch.cat([judged, text], 1)
        logits = model(whole[:, :-1], logits_to_keep=text.shape[1]).logits
        rows = logits.log_softmax(-1).gather(2, text[:, :, None])
        scores = rows[:, :, 0].double().sum(1).numpy()
        log_weights, known = log_weights + scores - known, scores
    return log_weights


def reward(model: Any, llm: AsyncLM, blocks: int) -> Contestants:
    """One filter by each."""
    reward_smc = program("reward_smc")["reward_smc"]
    judge = prompt_of(PROMPT + 1)

    def own() -> Any:
        particles = llm.population(prompt_of(PROMPT), PARTICLES)
        judges = llm.population(judge, PARTICLES)
        return reward_smc(particles, judges, scale=1.0, blocks=blocks, block=BLOCK)

    return {
        "prefill for each block": lambda: reward_from_scratch(model, judge, blocks),
        "program": own,
    }


# -- distillation -----------------------------------------------------------------------


@torch.inference_mode()
def whole_logits(teacher: Any, student: Any, text: list[int]) -> torch.Tensor:
    """Divergences, with the logits of both in memory."""
    ids = torch.tensor([text[:-1]])
    first, second = (model(ids).logits[0].log_softmax(-1) for model in (teacher, student))
    terms = torch.nn.functional.kl_div(second, first, log_target=True, reduction="none")
    return terms.sum(1)


@contextmanager
def distil_contestant(
    name: str, text: list[int], **options: Any
) -> Iterator[Callable[[], Any]]:
    """The models, and what a contestant computes."""
    teacher = llama(DISTIL_VOCABULARY)
    student = llama(DISTIL_VOCABULARY)
    with torch.no_grad():
        for weight in student.parameters():
            weight.mul_(1.1)
    if name == "logits in memory":
        teacher(torch.tensor([text[:8]]))
        yield functools.partial(whole_logits, teacher, student, text)
        return
    with (
        served(teacher, DISTIL_VOCABULARY, **options) as first,
        served(student, DISTIL_VOCABULARY, **options) as second,
    ):
        for llm in (first, second):
            llm.score_sync(text[:8])
        divergences = program("distil")["divergences"]
        yield lambda: divergences(first, text[:1], second, text[:1], text[1:])


def distil_in_process(name: str, tokens: int, clock: Clock, **options: Any) -> None:
    """Print the seconds and MiB of a contestant, and the mean of its results."""
    text = (prompt_of(tokens) * 2)[:tokens]
    with distil_contestant(name, text, **options) as run:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
        before = resident_bytes("VmHWM")
        start = clock()
        divergence = run()
        elapsed = clock() - start
        grown = (resident_bytes("VmHWM") - before) / 2**20
        print(elapsed, grown, float(divergence.double().mean()))


def distil(rounds: int, tokens: int, more: list[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds and MiB, by contestant."""
    names = ("logits in memory", "program")
    times: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        means = []
        for name in names:
            command = [sys.executable, __file__, "--distil", str(tokens), *more, "--only", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            elapsed, grown, mean = map(float, done.stdout.split()[-3:])
            times[name].append(elapsed)
            memory[name].append(grown)
            means.append(mean)
        np.testing.assert_allclose(means[1], means[0], rtol=1e-3)
    print("distil", times, memory, flush=True)
    return {f"distil {tokens}": times, f"distil {tokens}, MiB": memory}


# -- all --------------------------------------------------------------------------------


def particle_programs(
    options: argparse.Namespace, prepack: bool
) -> dict[str, dict[str, list[float]]]:
    """Seconds, by case and contestant."""
    model = llama()
    found = {}
    with served(model, 8_000, prepack=prepack) as llm:
        cases: dict[str, Callable[[], Contestants]] = {}
        for text in options.beams:
            width, tokens = map(int, text.split("/"))
            cases[f"beams {text}"] = functools.partial(beams, model, llm, width, tokens)
        for tokens in options.power:
            cases[f"power {PARTICLES}/{tokens}"] = functools.partial(power, model, llm, tokens)
        for blocks in options.reward:
            name = f"reward {PARTICLES}/{blocks}x{BLOCK}"
            cases[name] = functools.partial(reward, model, llm, blocks)
        for name, contestants in cases.items():
            timed = {
                contestant: functools.partial(seconds, run, CLOCKS[options.clock])
                for contestant, run in contestants().items()
            }
            measured = in_turn(timed, options.rounds, name)
            found[name] = {
                "peer" if contestant != "program" else contestant: values
                for contestant, values in measured.items()
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beams", nargs="*", default=["10/16", "100/16", "1000/8"])
    parser.add_argument("--power", nargs="*", type=int, default=[64], help="tokens")
    parser.add_argument("--reward", nargs="*", type=int, default=[4], help="blocks")
    parser.add_argument("--distil", nargs="*", type=int, default=[1024], help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--no-prepack", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepack = not options.no_prepack
    if options.only is not None:
        clock = CLOCKS[options.clock]
        distil_in_process(options.only, options.distil[0], clock, prepack=prepack)
        return
    found = particle_programs(options, prepack)
    for tokens in options.distil:
        more = ["--clock", options.clock, *["--no-prepack"] * (not prepack)]
        measured = distil(options.rounds, tokens, more)
        for case, samples in measured.items():
            found[case] = {
                "peer" if name != "program" else name: values
                for name, values in samples.items()
            }
    print_cases(
        "programs",
        found,
        base="peer",
        unit="s",
        extra={
            "rounds": options.rounds,
            "prompt": PROMPT,
            "prepack": prepack,
            "clock": options.clock,
        },
    )


if __name__ == "__main__":
    main()
