"""What does a constraint add to a step of a population?

Members are extended by the tokens that are drawn for them, after a prompt of 64 tokens: once
without a constraint, and with each kind that `genlm.constraints` has.

- `automaton`: words of up to eight letters, by a regular expression.
- `grammar`: a JSON string of any text, by xgrammar, with a matcher for each distinct history.
- `python`: a function of the bytes, called for the drawn tokens.

The limit is the time without a constraint; the ratio is that time by a contestant's in the same
round, the median over rounds. Figures are the CPU time of the whole process in milliseconds a
step, other threads included (`--clock wall` for elapsed time). `caller` has microseconds of the
caller's own thread that `advance` takes in a step. Model: a Llama of 31 million
parameters with random weights, on hf with a second copy of the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

from particle_model import llama, prompt_of, tokenizer
from particle_population import CLOCKS, Clock
from report import in_turn, print_cases

from genlm import AsyncLM, OutputCache
from genlm.constraints import Automaton, Constraint, Grammar, Language, Python
from genlm_hf.engine import HFEngine

SEED, PROMPT, STOP = 5, 64, 7999
LANGUAGES: dict[str, tuple[Language, bytes]] = {
    "automaton": (Automaton.regex(r"(\w{1,8}[^\w]+)*\w{0,8}"), b""),
    "grammar": (Grammar.json_schema({"type": "string"}), b'"'),
    "python": (Python(lambda text: b"q" not in text), b""),
}


async def steps(
    llm: AsyncLM, size: int, count: int, constraint: Constraint | None, clock: Clock
) -> tuple[float, float]:
    """Return seconds a step, and those of the caller's thread in the constraint's methods."""
    population = llm.population(prompt_of(PROMPT), size)
    own = began = 0.0
    for step in range(-2, count):  # two to warm up: the prompt, and the first members
        if step == 0:
            began, own = clock(), 0.0
        if constraint is None:
            drawn = await population.draw(seed=SEED)
        else:
            drawn = await constraint.draw(population, seed=SEED)
        population = population.extend(drawn.token_ids)
        if constraint is not None:
            before = time.thread_time()
            constraint = constraint.advance(drawn.token_ids)
            own += time.thread_time() - before
    return (clock() - began) / count, own / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    clock, found, caller = CLOCKS[options.clock], {}, {}
    model = llama()
    with AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer(), prepack=True),
        output_cache=OutputCache(0),
    ) as llm:
        for size in options.sizes:
            own: dict[str, list[float]] = {name: [] for name in LANGUAGES}

            def measured(
                name: str | None, size: int = size, own: dict[str, list[float]] = own
            ) -> float:
                constraint = None
                if name is not None:
                    language, text = LANGUAGES[name]
                    constraint = language.start(llm, size, text=text, stop=[STOP])
                took, thread = asyncio.run(steps(llm, size, options.steps, constraint, clock))
                if name is not None:
                    own[name].append(thread * 1e6)
                return took * 1e3

            contestants: dict[str, Callable[[], float]] = {"none": lambda: measured(None)}
            for name in LANGUAGES:
                contestants[name] = lambda name=name: measured(name)
            found[f"{size} members"] = in_turn(contestants, options.rounds, f"{size} members")
            caller[size] = {
                name: round(statistics.median(each), 1) for name, each in own.items()
            }
            print("caller's thread, us a step", caller[size], flush=True)
    print_cases(
        "constraints",
        found,
        base="none",
        unit="ms a step",
        extra={"seed": SEED, "clock": options.clock, "caller_us": caller},
    )


if __name__ == "__main__":
    main()
