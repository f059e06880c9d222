"""`genlm demo`: unconstrained samples and the SMC example on one model, with their speed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from genlm.cli.arguments import (
    EngineOption,
    JsonOption,
    ModelOption,
    SeedOption,
    bad_value,
    load,
)
from genlm.cli.output import borderless_table, output_console, print_json, progress_bar

if TYPE_CHECKING:
    from genlm.core.model.lm import AsyncLM

__all__ = ["demo"]

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
    as_json: JsonOption = False,
) -> None:
    """Sample texts without and with a limit on the length of words, and report the speed."""
    if max(map(len, _WORD.findall(prompt.encode())), default=0) > max_letters:
        raise bad_value(
            "--prompt",
            f"the prompt {prompt!r} itself has a word of more than {max_letters} letters",
        )
    with load(model, backend, {}) as llm:
        coroutine = _report(
            llm,
            model,
            prompt=prompt,
            count=particles,
            max_tokens=max_tokens,
            max_letters=max_letters,
            seed=seed,
        )
        report = asyncio.run(coroutine)
    if as_json:
        print_json(report)
    else:
        _print(report)


async def _report(
    llm: AsyncLM,
    model: str,
    *,
    prompt: str,
    count: int,
    max_tokens: int,
    max_letters: int,
    seed: int,
) -> dict[str, Any]:
    """Draw the samples, then the particles, from independent streams of one seed.

    Returns:
        The report of `--json`. The particles are in descending order of their weights.
    """
    from genlm.cli.smc import max_word_length
    from genlm.cli.text_ids import text_ids
    from genlm.smc import steer

    ids = text_ids(llm.vocabulary, prompt)
    continuations = await llm.batch_sample([ids] * _SAMPLES, max_tokens, seed=seed)
    rule = max_word_length(max_letters).start(llm, count, text=prompt.encode())
    steps = steer(llm, ids, count, max_tokens=max_tokens, constraint=rule, seed=seed)
    began = time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("steering", total=max_tokens)
        async for particles in steps:  # noqa: B007 - the last ones
            bar.advance(task)
    seconds = time.perf_counter() - began
    texts = [context.token_ids for context in particles.population]
    weights = particles.weights.tolist()
    statistics = llm.statistics()
    tokens = sum(len(text) - len(ids) for text in texts)
    samples = [(*ids, *sample) for sample in continuations]
    by_weight = sorted(range(count), key=lambda i: -weights[i])
    return {
        "backend": llm.name,
        "model": model,
        "prompt": prompt,
        "constraint": f"no word has more than {max_letters} letters",
        "seed": seed,
        "samples": [llm.decode(sample) for sample in samples],
        "particles": [{"text": llm.decode(texts[i]), "weight": weights[i]} for i in by_weight],
        "effective_sample_size": 1 / sum(weight**2 for weight in weights),
        "log_evidence": particles.log_evidence,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "cut_by_context": _cut_by_context(llm, [*samples, *texts], len(ids) + max_tokens),
        "statistics": {name: getattr(statistics, name) for name in _FIGURES},
    }


def _cut_by_context(llm: AsyncLM, texts: Sequence[Sequence[int]], longest: int) -> int:
    """Count the texts that end because the model's context is full."""
    if llm.max_context is None:
        return 0
    end = llm.vocabulary.eos_token_id
    return sum(llm.max_context < len(ids) < longest and ids[-1] != end for ids in texts)


def _print(report: Mapping[str, Any]) -> None:
    console = output_console()
    particles, samples = report["particles"], report["samples"]
    title = f"{report['backend']}, model {report['model']!r}: unconstrained samples"
    console.print(title, style="bold")
    for sample in samples:
        console.print(f"  {sample!r}")
    console.print(f"\nconstrained: {report['constraint']}", style="bold")
    console.print(_table(particles))
    if report["cut_by_context"]:
        count = f"{report['cut_by_context']} of {len(samples) + len(particles)} texts"
        problem = "end where the model's context is full, before --max-tokens"
        console.print(f"\n{count} {problem}", style="yellow")
    figures = report["statistics"]
    console.print(
        f"\neffective sample size {report['effective_sample_size']:.1f} "
        f"of {len(particles)}, log-evidence {report['log_evidence']:.3f}\n"
        f"{report['tokens']} tokens in {report['seconds']:.2f} s: "
        f"{report['tokens_per_second']:,.0f} a second\n"
        f"{figures['requests']} requests for rows: {figures['joined']} joined a pending "
        f"request, {figures['cache_hits']} were in the output cache;\n"
        f"{figures['batches']} batches, {figures['mean_batch_size']:.1f} sequences each, "
        f"{figures['largest_batch']} at most"
    )


def _table(particles: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the distinct texts, in descending order of their total weights."""
    copies: dict[str, list[float]] = {}
    for particle in particles:
        copies.setdefault(particle["text"], []).append(particle["weight"])
    table = borderless_table("weight", "particles", justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for text, weights in sorted(copies.items(), key=lambda item: -sum(item[1])):
        table.add_row(f"{sum(weights):.4f}", str(len(weights)), repr(text))
    return table
