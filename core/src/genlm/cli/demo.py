"""`genlm demo`: samples of a model, and particles under the constraint of `examples/smc.py`."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from genlm.cli.arguments import EngineOption, ModelOption, SeedOption, bad_value, load
from genlm.cli.output import output_console

_SAMPLES = 3


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
        int, typer.Option(min=1, max=100, help="Maximum length of a word in letters.")
    ] = 5,
    seed: SeedOption = 0,
) -> None:
    """Sample texts without and with a limit on the length of words, and report the speed."""
    from genlm.cli.smc import max_word_length
    from genlm.cli.text_ids import text_ids
    from genlm.smc import steer_sync

    try:
        text = prompt.encode()
    except UnicodeEncodeError as error:
        raise bad_value("--prompt", "not UTF-8") from error
    constraint = max_word_length(max_letters)
    if text not in constraint:
        raise bad_value(
            "--prompt",
            f"the prompt {prompt!r} itself has a word of more than {max_letters} letters",
        )
    console = output_console()
    with load(model, backend, {}) as llm:
        ids = text_ids(llm.vocabulary, prompt)
        console.print(f"{llm.name}, model {model!r}: unconstrained samples", style="bold")
        for sample in llm.batch_sample_sync([ids] * _SAMPLES, max_tokens, seed=seed):
            console.print(f"  {llm.decode((*ids, *sample))!r}")
        console.print(
            f"\nconstrained: no word has more than {max_letters} letters", style="bold"
        )
        began = time.perf_counter()
        *_, last = steer_sync(
            llm,
            ids,
            particles,
            max_tokens=max_tokens,
            constraint=constraint,
            text=text,
            seed=seed,
            progress=Console(stderr=True).is_terminal,
        )
        seconds = time.perf_counter() - began
        tokens = int(last.population.lengths.sum()) - particles * len(ids)
        console.print(str(last))
        console.print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} a second")
