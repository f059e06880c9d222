"""Losses of a student against a teacher over a text, without all of their rows in memory.

Here the teacher is the same model with a longer prompt, as in prompt distillation; two models
need one vocabulary. `reduce_text` reduces the rows of all positions of a text where the logits
are: to the teacher's best tokens, or to divergences, for some positions at a time.
"""

import sys

import torch

import genlm


class Divergence(genlm.GroupReduction):
    """The Kullback-Leibler divergence at each position from the teacher's row there."""

    def __init__(self, teacher):
        self.teacher = teacher

    def compute(self, rows, row_of, members):
        teacher = self.teacher[members].to(rows.device)
        terms = teacher.exp() * (teacher - rows[row_of.to(rows.device)])
        return (terms.nan_to_num(0).sum(1),)  # 0 times -inf for ids that no token has


def divergences(teacher, teacher_prompt, student, student_prompt, text, piece=128):
    """Return the divergence at each token of a text, with `piece` rows in memory."""
    results = []
    for begin in range(0, len(text), piece):
        part, place = [*teacher_prompt, *text[: begin + piece]], len(teacher_prompt) + begin
        rows = teacher.reduce_text_sync(part, lambda rows: rows, place)
        part, place = [*student_prompt, *text[: begin + piece]], len(student_prompt) + begin
        results.append(student.reduce_text_sync(part, Divergence(rows), place))
    return torch.cat(results)


if __name__ == "__main__":
    with genlm.load_model(*sys.argv[1:] or ["demo"]) as llm:  # a model and an engine
        short, text = llm.encode("The method"), llm.encode(" raises an error.", begin=False)
        prompt = llm.encode("If the file cannot be opened, the method")
        print("cross entropy", -llm.score_sync(short + text, len(short)))
        print("divergence", divergences(llm, prompt, llm, short, text))
        targets = llm.reduce_text_sync(prompt + text, lambda rows: rows.topk(4), len(prompt))
        print("targets", targets)
