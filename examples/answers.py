"""Answers to many questions, each in its own format, with the probability of each answer.

Each question has a particle filter under a language: a regular expression, or given texts. All
filters are one population, so a data set of questions with a few particles each costs little
more than one question with as many particles. The weights of the particles with an answer
estimate its probability, given that the model answers in the format, summed over all ways in
which tokens write the answer.
"""

import sys

import genlm
from genlm.constraints import Automaton
from genlm.smc import batch_steer_sync

ERROR = Automaton.regex(" (Value|Type|Key|Index|Import|OS)Error")
QUESTIONS = {
    "If the argument is wrong, this raises": ERROR,
    "If the argument is None, this raises": ERROR & ~Automaton.regex(" (Type|Value).*"),
    "If the list has no items, the result is": Automaton.choice([" None", " True", " False"]),
}


def answers(llm, questions, size, seed=0):
    """Return the `Particles` of each question, a mapping of prompts to languages."""
    prompts = [llm.encode(question) for question in questions]
    *_, batch = batch_steer_sync(
        llm, prompts, size, max_tokens=30, constraint=[*questions.values()], seed=seed
    )
    return list(batch)


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        for question, particles in zip(QUESTIONS, answers(llm, QUESTIONS, size=50)):
            print(f"{question!r}, log-evidence {particles.log_evidence:.3f}")
            for text, weight in list(particles.text_weights.items())[:3]:
                print(f"{weight:8.3f} {text!r}")
