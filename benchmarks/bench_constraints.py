"""What does a constraint add to a step of a population?

Four populations are extended by the tokens that are drawn for them, after a prompt of 64
tokens: one without a constraint, and one for each kind of constraint in `genlm.constraints`.
Their steps alternate in random order, so that each is compared with a step without a
constraint at the same time, and none benefits from the caches that the same other one leaves.

- `automaton`: words of up to eight letters, by a regular expression.
- `grammar`: lines of quoted text, by xgrammar, with a matcher for each distinct history.
- `python`: a function of the bytes, called for the drawn tokens.

A step is a draw, the extension of the population and of the constraint, and reading the flags
of the finished members. Without a constraint, the members that drew the stop token are marked
as finished, so that all populations have finished members, which a draw leaves out.

Figures are the CPU time of all threads in milliseconds, with the masks of the next draw. The
ratio is the time without a constraint by a contestant's, the median over rounds. `caller_us`
has microseconds of the caller's thread that the constraint adds, the difference of the means
of the faster halves of the steps, and `loop_us` those of `advance` for tokens for which the
draw has not prepared it, repeated in a loop, where instructions and arrays remain in the
processor's caches.

The physical limits are `library_us`: the calls of xgrammar (an accepted token for each
distinct history, and one call that fills all masks) and the calls of the function of
`python`, both on other threads. Model: a Llama of 31 million parameters with random weights,
on hf with a second copy of the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import numpy as np
from particle_model import llama, prompt_of, tokenizer
from report import print_cases

from genlm import AsyncLM, OutputCache, Population
from genlm.constraints import Automaton, Constraint, Grammar, Language, Python
from genlm_hf.engine import HFEngine

SEED, PROMPT, STOP, WARM_UP = 5, 64, 7999, 2


class Function:
    """A function of the bytes of a text, with the number of calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: bytes) -> bool:
        self.calls += 1
        return b"q" not in text


NO_Q = Function()
LANGUAGES: dict[str, tuple[Language, bytes] | None] = {
    "none": None,
    "automaton": (Automaton.regex(r"(\w{1,8}[^\w]+)*\w{0,8}"), b""),
    "grammar": (Grammar.ebnf('root ::= ("\\"" [^"\\n]* "\\"\\n")*'), b'"'),
    "python": (Python(NO_Q), b""),
}


class Contestant:
    """A population, its constraint, and the measured times of its steps in seconds."""

    def __init__(
        self, llm: AsyncLM, size: int, constrained: tuple[Language, bytes] | None
    ) -> None:
        self.population: Population = llm.population(prompt_of(PROMPT), size)
        self.constraint: Constraint | None = None
        if constrained is not None:
            language, text = constrained
            self.constraint = language.start(llm, size, text=text, stop=[STOP])
        self.all_threads: list[float] = []
        self.callers_thread: list[float] = []

    async def step(self) -> None:
        """Draw a token for each member, and measure the time."""
        began, own = time.process_time(), time.thread_time()
        if self.constraint is None:
            drawn = await self.population.draw(seed=SEED)
            self.population = self.population.extend(drawn.token_ids)
            has_ended = drawn.token_ids.numpy() == STOP
            if has_ended.any():
                self.population = self.population.finish(has_ended)
        else:
            drawn = await self.constraint.draw(self.population, seed=SEED)
            self.population = self.population.extend(drawn.token_ids)
            self.constraint = self.constraint.advance(drawn.token_ids)
            self.constraint.finished.all()
        self.callers_thread.append(time.thread_time() - own)
        if self.constraint is not None:
            self.constraint.masks()  # waits until its thread is done
        self.all_threads.append(time.process_time() - began)


async def steps(contestants: list[Contestant], count: int) -> None:
    """Measure steps in turns, each time in another order."""
    orders = np.random.default_rng(SEED)
    for _ in range(count + WARM_UP):
        for place in orders.permutation(len(contestants)):
            await contestants[place].step()


def faster_half(times: list[float]) -> float:
    """Mean of the faster half of measured times after the warm-up, in microseconds."""
    return 1e6 * statistics.mean(sorted(times[WARM_UP:])[: -(-(len(times) - WARM_UP) // 2)])


def microseconds(run: Callable[[], object]) -> float:
    """CPU time of all threads that a call takes, in microseconds."""
    began = time.process_time()
    run()
    return (time.process_time() - began) * 1e6


def looped(contestant: Contestant, count: int = 50) -> float:
    """Microseconds of the caller's thread that `advance` and the flags take in a loop."""
    constraint, times, kept = contestant.constraint, [], []
    assert constraint is not None
    drawn = asyncio.run(constraint.draw(contestant.population, seed=SEED))
    for _ in range(count):
        began = time.thread_time()
        after = constraint.advance(drawn.token_ids)
        after.finished.all()
        times.append(time.thread_time() - began)
        after.masks()
        kept.append(after)  # in a program, the constraint's thread drops the matchers
    return statistics.median(times) * 1e6


def grammar_alone(llm: AsyncLM, population: Population) -> float:
    """Time of xgrammar's calls of a step for the last tokens of a population."""
    compiled = LANGUAGES["grammar"][0]._compiled.get(llm.vocabulary, [STOP])  # noqa: SLF001
    rows = np.unique(population.tokens.numpy()[:, PROMPT:], axis=0)
    rows = rows[~np.isin(rows, [-1, STOP]).any(1)]  # those that are not finished
    columns = rows.T.tolist()
    words = np.zeros((len(rows), -(-(len(compiled.tokens.texts) + 1) // 32)), np.int32)
    states = [compiled.first(b'"') for _ in rows]
    times = []
    for column in columns:

        def run(column: list[int] = column) -> None:
            states[:] = compiled.after(states, column)
            compiled.fill(states, words)

        times.append(microseconds(run))
    return statistics.median(times)


def function_alone(calls: float) -> float:
    """Time of so many calls of the function of `python`."""
    texts = [b"the text of a member %d" % member for member in range(round(calls))]
    return statistics.median(microseconds(lambda: [*map(NO_Q, texts)]) for _ in range(9))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=LANGUAGES, default=[*LANGUAGES][1:])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    model = llama()
    found: dict[str, dict[str, list[float]]] = {}
    caller: dict[str, dict[str, float]] = {}
    alone: dict[str, dict[str, float]] = {}
    loop: dict[str, dict[str, float]] = {}
    with AsyncLM(
        lambda: HFEngine.from_model(model, tokenizer(), prepack=True),
        output_cache=OutputCache(0),
    ) as llm:
        for size in options.sizes:
            case, NO_Q.calls = f"{size} members", 0
            contestants = {
                name: Contestant(llm, size, LANGUAGES[name])
                for name in ["none", *options.kinds]
            }
            asyncio.run(steps([*contestants.values()], options.steps))
            found[case] = {
                name: [1e3 * each for each in contestant.all_threads[WARM_UP:]]
                for name, contestant in contestants.items()
            }
            own = {
                name: faster_half(contestant.callers_thread)
                for name, contestant in contestants.items()
            }
            caller[case] = {"none": round(own["none"], 1)}
            for name in options.kinds:
                caller[case][name] = round(own[name] - own["none"], 1)
            calls = NO_Q.calls / (options.steps + WARM_UP)
            loop[case] = {name: round(looped(contestants[name]), 1) for name in options.kinds}
            alone[case] = {}
            if "grammar" in options.kinds:
                population = contestants["grammar"].population
                alone[case]["grammar"] = round(grammar_alone(llm, population), 1)
            if "python" in options.kinds:
                alone[case]["python"] = round(function_alone(calls), 1)
            print(
                case, "caller's thread, us", caller[case], "in a loop", loop[case], flush=True
            )
            print(case, "calls alone, us", alone[case], flush=True)
    print_cases(
        "constraints",
        found,
        base="none",
        unit="ms a step",
        extra={"seed": SEED, "caller_us": caller, "loop_us": loop, "library_us": alone},
    )


if __name__ == "__main__":
    main()
