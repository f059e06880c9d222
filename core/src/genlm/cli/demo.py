"""`genlm demo`: unconstrained samples and the SMC example on one model, with their speed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from genlm.cli.arguments import EngineOption, ModelOption, SeedOption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from genlm.core.model.lm import AsyncLM

__all__ = ["Particle", "Report", "demo"]

_SAMPLES = 3
_WORD = re.compile(rb"[A-Za-z\x80-\xff]+")
_FIGURES = (
    "requests",
    "joined",
    "cache_hits",
    "batches",
    "largest_batch",
    "mean_batch_size",
)


@dataclasses.dataclass(frozen=True)
class Particle:
    """One weighted text, prompt included."""

    text: str
    weight: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a demonstration; `--json` prints them.

    Attributes:
        backend: Name of the engine.
        model: Model id or path.
        prompt: Beginning of every text.
        constraint: Description of the constraint on the particles.
        seed: Random seed of the samples and the particles.
        samples: Texts sampled without the constraint.
        particles: Texts sampled under the constraint, in descending order of weight; the
            weights sum to 1.
        effective_sample_size: 1 over the sum of the squared weights.
        log_evidence: Estimated log-probability that the model satisfies the constraint.
        tokens: Number of tokens in the texts of the particles.
        seconds: Duration of the particle filter.
        cut_by_context: Number of texts that end before `--max-tokens` because the model's
            context is full.
        tokens_per_second: `tokens` divided by `seconds`.
        statistics: The batching and caching figures of `llm.statistics()`, for samples
            and particles together.
    """

    backend: str
    model: str
    prompt: str
    constraint: str
    seed: int
    samples: list[str]
    particles: list[Particle]
    effective_sample_size: float
    log_evidence: float
    tokens: int
    seconds: float
    tokens_per_second: float
    cut_by_context: int
    statistics: dict[str, int | float]


@dataclasses.dataclass(frozen=True)
class _Plan:
    prompt: str
    particles: int
    max_tokens: int
    max_letters: int
    seed: int


def demo(
    *,
    backend: EngineOption = "hf",
    model: ModelOption = "demo",
    prompt: Annotated[str, typer.Option(help="Beginning of every text.")] = "The",
    particles: Annotated[int, typer.Option(min=1, help="Number of particles.")] = 50,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens per text.")
    ] = 40,
    max_letters: Annotated[
        int, typer.Option(min=1, help="Maximum length of a word in letters.")
    ] = 5,
    seed: SeedOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Sample texts without and with a limit on the length of words, and report the speed."""
    from genlm.core.model.lm import load_model

    if max(map(len, _WORD.findall(prompt.encode())), default=0) > max_letters:
        raise typer.BadParameter(
            f"the prompt {prompt!r} itself has a word of more than {max_letters} letters",
            param_hint="--prompt",
        )
    plan = _Plan(prompt, particles, max_tokens, max_letters, seed)
    terminal = Console(stderr=True)
    with (
        load_model(model, backend, progress=terminal.is_terminal) as llm,
        Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar,
    ):
        task = bar.add_task("steering", total=max_tokens)
        report = asyncio.run(_report(llm, model, plan, lambda: bar.advance(task)))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print(report, Console())


async def _report(llm: AsyncLM, model: str, plan: _Plan, on_step: Callable[[], None]) -> Report:
    """Draw the samples, then the particles, from independent streams of one seed."""
    from genlm.cli.text_ids import text_ids

    ids = text_ids(llm.vocabulary, plan.prompt)
    drawn = await llm.batch_sample([ids] * _SAMPLES, plan.max_tokens, seed=plan.seed)
    began = time.perf_counter()
    texts, weights, log_evidence = await _steered(llm, ids, plan, on_step)
    seconds = time.perf_counter() - began
    statistics = llm.statistics()
    tokens = sum(len(text) - len(ids) for text in texts)
    samples = [(*ids, *sample) for sample in drawn]
    heaviest_first = sorted(range(len(texts)), key=lambda i: -weights[i])
    return Report(
        backend=llm.name,
        model=model,
        prompt=plan.prompt,
        constraint=f"no word has more than {plan.max_letters} letters",
        seed=plan.seed,
        samples=[llm.decode(sample) for sample in samples],
        particles=[Particle(llm.decode(texts[i]), float(weights[i])) for i in heaviest_first],
        effective_sample_size=1 / float((weights**2).sum()),
        log_evidence=log_evidence,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        cut_by_context=_cut_by_context(llm, [*samples, *texts], len(ids) + plan.max_tokens),
        statistics={name: getattr(statistics, name) for name in _FIGURES},
    )


async def _steered(
    llm: AsyncLM, ids: list[int], plan: _Plan, on_step: Callable[[], None]
) -> tuple[list[tuple[int, ...]], np.ndarray, float]:
    """Return the last texts, weights and log-evidence of the SMC example."""
    from genlm.cli.smc import max_word_length
    from genlm.smc import steer

    rule = max_word_length(plan.max_letters)
    text = plan.prompt.encode()
    async for particles in steer(  # noqa: B007 - the last ones
        llm,
        ids,
        plan.particles,
        max_tokens=plan.max_tokens,
        constraint=rule.start(llm, plan.particles, text=text),
        seed=plan.seed,
    ):
        on_step()
    texts = [context.token_ids for context in particles.population]
    return texts, particles.weights, particles.log_evidence


def _cut_by_context(llm: AsyncLM, texts: Sequence[Sequence[int]], longest: int) -> int:
    """Count the texts that the model's context ended, not their own end or `--max-tokens`."""
    if llm.max_context is None:
        return 0
    end = llm.vocabulary.eos_token_id
    return sum(llm.max_context < len(ids) < longest and ids[-1] != end for ids in texts)


def _print(report: Report, console: Console) -> None:
    console.print(
        Text(f"{report.backend}, model {report.model!r}: unconstrained samples", "bold")
    )
    for sample in report.samples:
        console.print(Text(f"  {sample!r}"))
    console.print(Text(f"\nconstrained: {report.constraint}", "bold"))
    console.print(_table(report.particles))
    if report.cut_by_context:
        console.print(
            Text(
                f"\n{report.cut_by_context} of {len(report.samples) + len(report.particles)} "
                f"texts end where the model's context is full, before --max-tokens",
                "yellow",
            )
        )
    figures = report.statistics
    console.print(
        Text(
            f"\neffective sample size {report.effective_sample_size:.1f} "
            f"of {len(report.particles)}, log-evidence {report.log_evidence:.3f}\n"
            f"{report.tokens} tokens in {report.seconds:.2f} s: "
            f"{report.tokens_per_second:,.0f} a second\n"
            f"{figures['requests']} requests for rows: {figures['joined']} joined a pending "
            f"request, {figures['cache_hits']} were in the output cache;\n"
            f"{figures['batches']} batches, {figures['mean_batch_size']:.1f} sequences each, "
            f"{figures['largest_batch']} at most"
        )
    )


def _table(particles: Sequence[Particle]) -> Table:
    """List the different texts, the heaviest first, with their copies' summed weight."""
    copies: dict[str, list[float]] = {}
    for particle in particles:
        copies.setdefault(particle.text, []).append(particle.weight)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("weight", justify="right", no_wrap=True)
    table.add_column("particles", justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for text, weights in sorted(copies.items(), key=lambda item: -sum(item[1])):
        table.add_row(f"{sum(weights):.4f}", str(len(weights)), Text(repr(text)))
    return table
