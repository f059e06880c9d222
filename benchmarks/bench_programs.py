"""How fast are the programs of `examples/`, compared with common implementations?

The programs run as they are, on `genlm-hf` with prepacked weights (`--no-prepack` for without),
and peers in plain transformers on the same model, the Llama of 31 million parameters with
random weights, float32. The limit is the time of the linear layers over each new token once.

- beams: `beam_search` against `generate(num_beams=...)`, both with as many beams returned.
- power: `power_smc` against the loop of the paper in transformers: `[N, 1]` decoding with
  a cache for every particle, which resampling reorders.
- chains: `power_mcmc`, eight moves, against one call of `generate` for each move, which
  computes the kept tokens of all texts again, padded to the longest.
- reward: `reward_smc`, whose reward is the log-probability under another prompt, against
  requests to an endpoint that keeps nothing between them: each block generates after a prefill
  of all tokens so far, and scores whole texts. The requests of a block are one batch.
- twisted, importance: `twisted`, and `importance` with another prompt as the proposal, against
  the same loops over `[N, 1]` decoding in transformers.
- ensemble: the product of two models with different tokenizers by `ensemble`, against the same
  program with a reader in transformers, which recomputes the new tokenizations of a particle
  in one padded batch. Their texts and weights are equal.
- distil: the divergence of a student from a teacher at each position of a text, against the
  logits of both in memory. 32,000 ids; each contestant in a separate process, which also
  reports the growth of its peak memory.

All contestants run in turn in every round. Figures are the CPU time of the whole process
(`--clock wall` for elapsed time); the ratio is the peer's time by the program's in the same
round, the median over rounds. Results that are not random are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import copy
import functools
import heapq
import operator
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_scores import resident_bytes
from particle_model import cache_argument, llama, prompt_of, tokenizer
from particle_population import CLOCKS, Clock
from report import in_turn, print_cases

import genlm
from genlm import AsyncLM, OutputCache
from genlm.smc import resampled
from genlm_hf.engine import HFEngine

PROMPT, ALPHA, PARTICLES, BLOCK, SPACES, MOVES = 64, 4.0, 32, 16, 3, 8
READERS, TEXT = 4, b"The function "
DISTIL_VOCABULARY = 32_000
Contestants = dict[str, Callable[[], Any]]


def program(name: str) -> Any:
    """The functions of a program of `examples/`."""
    folder = Path(__file__).parents[1] / "examples"
    return runpy.run_path(str(folder / f"{name}.py"))


def served(model: Any, vocab_size: int, *, ends: bool = False, **options: Any) -> AsyncLM:
    """The model on `genlm-hf`, without an output cache; its last id may be an end of text."""
    encoder = tokenizer(vocab_size)
    if ends:
        encoder.eos_token = encoder.convert_ids_to_tokens(vocab_size - 1)
    return AsyncLM(
        lambda: HFEngine.from_model(model, encoder, **options),
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
        torch.tensor([prompt_of(PROMPT)], device=model.device),
        attention_mask=torch.ones(1, PROMPT, dtype=torch.long, device=model.device),
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


class Lockstep:
    """Particles in transformers: `[N, 1]` decoding with a cache, which resampling reorders."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self._model = model
        self._past = transformers.DynamicCache(config=model.config)
        logits = model(torch.tensor([prompt]), **cache_argument(model, self._past)).logits[
            :, -1
        ]
        self._past.batch_repeat_interleave(PARTICLES)
        self._rows: torch.Tensor | None = logits.float().log_softmax(-1).expand(PARTICLES, -1)
        self._new = torch.empty(0)

    @property
    def rows(self) -> torch.Tensor:
        """The log-probabilities of the next tokens, computed when they are needed."""
        if self._rows is None:
            cache = cache_argument(self._model, self._past)
            logits = self._model(self._new, **cache, use_cache=True).logits[:, -1]
            self._rows = logits.float().log_softmax(-1)
        return self._rows

    def extend(self, token_ids: torch.Tensor) -> None:
        """Append a token to each particle, shape `(n, 1)`."""
        self._new, self._rows = token_ids, None

    def resample(self, ancestors: np.ndarray) -> None:
        """Keep copies of the ancestors."""
        if (ancestors == np.arange(PARTICLES)).all():
            return
        chosen = torch.from_numpy(ancestors)
        self._past.reorder_cache(chosen)
        if self._rows is None:
            self._new = self._new[chosen]
        else:
            self._rows = self._rows[chosen]


@torch.inference_mode()
def power_by_hand(model: Any, tokens: int) -> np.ndarray:
    """Power-SMC in transformers: returns log-weights."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    particles, log_weights = Lockstep(model, prompt_of(PROMPT)), np.zeros(PARTICLES)
    for _ in range(tokens):
        ancestors, log_weights = resampled(log_weights, rng.random())
        particles.resample(ancestors)
        rows = particles.rows
        proposal = (ALPHA * rows).log_softmax(-1)
        drawn = torch.multinomial(proposal.exp(), 1, generator=generator)
        gains = ALPHA * rows.gather(1, drawn) - proposal.gather(1, drawn)
        log_weights = log_weights + gains[:, 0].double().numpy()
        particles.extend(drawn)
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
def chains_by_hand(model: Any, tokens: int) -> torch.Tensor:
    """Power-MCMC in transformers: returns the texts."""
    rng, prompt = np.random.default_rng(0), torch.tensor(prompt_of(PROMPT))
    texts = torch.zeros(PARTICLES, tokens, dtype=torch.long)
    log_ratios = torch.zeros(PARTICLES, tokens, dtype=torch.float64)
    for move in range(MOVES + 1):
        cuts = rng.integers(0, tokens, PARTICLES) * (move > 0)
        width = PROMPT + int(cuts.max())
        kept = torch.zeros(PARTICLES, width, dtype=torch.long)
        mask = kept.clone()
        for chain, cut in enumerate(cuts.tolist()):
            kept[chain, width - PROMPT - cut :] = torch.cat([prompt, texts[chain, :cut]])
            mask[chain, width - PROMPT - cut :] = 1
        found = model.generate(
            kept,
            attention_mask=mask,
            do_sample=True,
            temperature=1 / ALPHA,
            top_k=0,
            max_new_tokens=tokens - int(cuts.min()),
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        drawn = found.sequences[:, width:, None]
        rows = torch.stack(found.logits, 1).log_softmax(-1)
        proposal = (ALPHA * rows).log_softmax(-1)
        gains = (ALPHA * rows.gather(2, drawn) - proposal.gather(2, drawn))[..., 0].double()
        proposed, ratios = texts.clone(), log_ratios.clone()
        for chain, cut in enumerate(cuts.tolist()):
            proposed[chain, cut:] = drawn[chain, : tokens - cut, 0]
            ratios[chain, cut:] = gains[chain, : tokens - cut]
        threshold = torch.from_numpy(np.log(rng.random(PARTICLES)))
        accepted = (threshold < (ratios - log_ratios).sum(1))[:, None] | (move == 0)
        texts = torch.where(accepted, proposed, texts)
        log_ratios = torch.where(accepted, ratios, log_ratios)
    return texts


def chains(model: Any, llm: AsyncLM, tokens: int) -> Contestants:
    """The same number of moves by each."""
    power_mcmc = program("power_mcmc")["power_mcmc"]
    arguments = {"alpha": ALPHA, "max_tokens": tokens, "moves": MOVES}
    return {
        "transformers": lambda: chains_by_hand(model, tokens),
        "program": lambda: power_mcmc(llm, prompt_of(PROMPT), PARTICLES, **arguments),
    }


@torch.inference_mode()
def twisted_by_hand(
    model: Any, lookahead: Callable[..., np.ndarray], counts: np.ndarray, tokens: int
) -> np.ndarray:
    """Twisted SMC in transformers: returns log-weights."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    particles, needed = Lockstep(model, prompt_of(PROMPT)), np.full(PARTICLES, SPACES)
    shares = np.bincount(counts, particles.rows[0].double().exp())[: SPACES + 1]
    table = lookahead(shares, SPACES, tokens)
    log_weights = table[tokens, needed]
    for left in reversed(range(tokens)):
        ancestors, log_weights = resampled(log_weights, rng.random())
        particles.resample(ancestors)
        needed = needed[ancestors]
        bias = table[left, needed[:, None] - counts] - table[left + 1, needed][:, None]
        twisted = particles.rows + torch.from_numpy(bias).float()
        drawn = torch.multinomial(twisted.softmax(-1), 1, generator=generator)
        log_weights = log_weights + twisted.logsumexp(-1).double().numpy()
        particles.extend(drawn)
        needed = needed - counts[drawn[:, 0]]
    return log_weights


def twisted(model: Any, llm: AsyncLM, tokens: int) -> Contestants:
    """One filter by each."""
    functions = program("twisted")
    counts = np.array([min(bytes(each).count(b" "), SPACES + 1) for each in llm.byte_vocab])
    arguments = {"spaces": SPACES, "max_tokens": tokens}
    prompt = prompt_of(PROMPT)
    return {
        "transformers": lambda: twisted_by_hand(model, functions["lookahead"], counts, tokens),
        "program": lambda: functions["twisted"](llm, prompt, PARTICLES, **arguments),
    }


@torch.inference_mode()
def importance_by_hand(model: Any, tokens: int) -> np.ndarray:
    """Importance draws in transformers: returns log-weights."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    base, proposal = (Lockstep(model, prompt_of(PROMPT + more)) for more in (0, 1))
    log_weights = np.zeros(PARTICLES)
    for _ in range(tokens):
        ancestors, log_weights = resampled(log_weights, rng.random())
        for particles in (base, proposal):
            particles.resample(ancestors)
        drawn = torch.multinomial(proposal.rows.exp(), 1, generator=generator)
        gains = base.rows.gather(1, drawn) - proposal.rows.gather(1, drawn)
        log_weights = log_weights + gains[:, 0].double().numpy()
        for particles in (base, proposal):
            particles.extend(drawn)
    return log_weights


def importance(model: Any, llm: AsyncLM, tokens: int) -> Contestants:
    """One filter by each."""
    function = program("importance")["importance"]

    def own() -> Any:
        populations = (llm.population(prompt_of(PROMPT + more), PARTICLES) for more in (0, 1))
        return function(*populations, max_tokens=tokens)

    return {
        "transformers": lambda: importance_by_hand(model, tokens),
        "program": own,
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
            logits = model(new, **cache_argument(model, past), logits_to_keep=1).logits[:, -1]
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


# -- ensembles --------------------------------------------------------------------------


class ModelByHand:
    """A model and the bytes of its tokens, in the order of the bytes, the end of text last."""

    def __init__(self, model: Any, llm: AsyncLM) -> None:
        self.model, self.vocabulary = model, llm.vocabulary
        end = llm.vocabulary.eos_token_id
        texts = [bytes(each) for each in llm.byte_vocab]
        order = sorted((i for i in range(len(texts)) if i != end), key=texts.__getitem__)
        self.order, self.texts = [*order, end], [texts[i] for i in order]
        self.bounds = functools.cache(self._bounds)

    def encode(self, text: str) -> list[int]:
        """Nothing for an empty text: the readers begin with the end of text."""
        assert not text
        return []

    def _bounds(self, partial: bytes) -> np.ndarray:
        """Where the tokens after some bytes are, for each next byte, and their end."""
        after = [bisect.bisect_left(self.texts, partial + bytes([i])) for i in range(256)]
        end = self.bounds(partial[:-1])[partial[-1] + 1] if partial else len(self.texts)
        return np.array([*after, end])


class ReaderByHand:
    """`genlm.ByteReader` in transformers: a beam of tokenizations, computed from scratch.

    A hypothesis consists of its tokens, their weight, the bytes of its partial token, and its
    mass. A row has cumulative probabilities in the order of the bytes.
    """

    STOP = genlm.ByteReader.STOP

    def __init__(self, llm: ModelByHand, width: int = 32) -> None:
        self.llm, self.width, self.logprob = llm, width, 0.0
        self.rows: dict[tuple[int, ...], np.ndarray] = {}
        self.beam: list[tuple[tuple[int, ...], float, bytes, float]] = []

    def copy(self) -> ReaderByHand:
        """A reader in the same state, which shares the rows."""
        return copy.copy(self)

    async def start(self, token_ids: list[int]) -> None:
        """Start after a beginning."""
        self.keep([(tuple(token_ids), 1.0, b"", 1.0)])

    @torch.inference_mode()
    def keep(self, beam: list[tuple[tuple[int, ...], float, bytes, float]]) -> None:
        """Keep the most likely hypotheses, and compute their rows in one padded batch."""
        kept = heapq.nlargest(self.width, beam, key=operator.itemgetter(3))
        total = sum(mass for *_, mass in kept)
        self.beam = [(i, w / total, p, m / total) for i, w, p, m in kept if m > 0]
        if not (new := [ids for ids, *_ in self.beam if ids not in self.rows]):
            return
        longest = max(map(len, new))
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in new])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in new])
        ends = torch.tensor([len(ids) - 1 for ids in new])
        logits = self.llm.model(padded, attention_mask=mask).logits
        rows = logits[torch.arange(len(new)), ends].double().softmax(-1)[:, self.llm.order]
        sums = torch.nn.functional.pad(rows.cumsum(-1), (1, 0)).numpy()
        self.rows |= dict(zip(new, sums, strict=True))

    def probabilities(self) -> np.ndarray:
        """The distribution of the next byte, and that of the end."""
        found = np.zeros(257)
        for ids, weight, partial, _ in self.beam:
            row = self.rows[ids]
            found[:256] += weight * np.diff(row[self.llm.bounds(partial)])
            if not partial:
                found[self.STOP] += weight * (row[-1] - row[-2])
        return found / found.sum()

    async def read(self, text: bytes) -> None:
        """Advance by bytes."""
        for byte in text:
            self.logprob += float(np.log(self.probabilities()[byte]))
            beam = []
            for ids, weight, partial, _ in self.beam:
                row, after = self.rows[ids], partial + bytes([byte])
                place, longer = self.llm.bounds(partial)[byte], self.llm.bounds(after)
                mass = weight * float(row[longer[256]] - row[longer[0]])
                beam.append((ids, weight, after, mass))
                if longer[0] > place:  # some bytes are a token
                    mass = weight * float(row[place + 1] - row[place])
                    beam.append(((*ids, self.llm.order[place]), mass, b"", mass))
            self.keep(beam)


def ensemble(models: Sequence[Any], llms: Sequence[AsyncLM], length: int) -> Contestants:
    """One filter by each."""
    own, by_hand = (program("ensemble")["ensemble"] for _ in range(2))
    by_hand.__globals__["genlm"] = types.SimpleNamespace(ByteReader=ReaderByHand)

    def run(function: Any, models: Sequence[Any]) -> Any:
        return asyncio.run(function(models, TEXT, READERS, max_bytes=length))

    def peer() -> Any:
        return run(by_hand, [*map(ModelByHand, models, llms)])

    contestants = {"transformers": peer, "program": lambda: run(own, llms)}
    (texts, weights), (own_texts, own_weights) = (each() for each in contestants.values())
    assert texts == own_texts
    np.testing.assert_allclose(own_weights, weights, atol=1e-3)
    return contestants


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
    model, other = llama(), llama(4_000)
    found = {}
    with (
        served(model, 8_000, prepack=prepack) as llm,
        served(model, 8_000, ends=True, prepack=prepack) as first,
        served(other, 4_000, ends=True, prepack=prepack) as second,
    ):
        cases: dict[str, Callable[[], Contestants]] = {}
        for text in options.beams:
            width, tokens = map(int, text.split("/"))
            cases[f"beams {text}"] = functools.partial(beams, model, llm, width, tokens)
        for name, function in {
            "power": power,
            "chains": chains,
            "twisted": twisted,
            "importance": importance,
        }.items():
            for tokens in getattr(options, name):
                case = f"{name} {PARTICLES}/{tokens}"
                cases[case] = functools.partial(function, model, llm, tokens)
        for blocks in options.reward:
            name = f"reward {PARTICLES}/{blocks}x{BLOCK}"
            cases[name] = functools.partial(reward, model, llm, blocks)
        for length in options.ensemble:
            cases[f"ensemble {READERS}/{length}"] = functools.partial(
                ensemble, (model, other), (first, second), length
            )
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
    parser.add_argument("--chains", nargs="*", type=int, default=[64], help="tokens")
    parser.add_argument("--twisted", nargs="*", type=int, default=[32], help="tokens")
    parser.add_argument("--importance", nargs="*", type=int, default=[32], help="tokens")
    parser.add_argument("--ensemble", nargs="*", type=int, default=[8], help="bytes")
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
