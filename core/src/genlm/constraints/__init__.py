r"""Constraints that follow a population: regular languages, grammars and functions.

    date = genlm.constraints.Automaton.regex(r"\d{4}-\d\d-\d\d")
    for particles in genlm.smc.steer_sync(llm, prompt, 100, max_tokens=20, constraint=date):
        ...

A `Language` is a set of texts; its method `start` returns the `Constraint` of a population, for
programs that implement the loop:

    constraint = date.start(llm, len(population))
    drawn = await constraint.draw(population)
    population = population.extend(drawn.token_ids)[ancestors]
    constraint = constraint.advance(drawn.token_ids)[ancestors]

Texts are bytes. The model's end-of-text token, or one of the stop tokens, ends a complete text.
Special tokens, and tokens without bytes, are not part of any text.
"""

from genlm.constraints.automaton import Automaton
from genlm.constraints.grammar import Grammar
from genlm.constraints.languages import Language
from genlm.constraints.predicate import Python
from genlm.constraints.protocol import Constraint

__all__ = ["Automaton", "Constraint", "Grammar", "Language", "Python"]
