"""Plots of particle filters with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from genlm.smc.resampling import normalised_weights

if TYPE_CHECKING:
    from genlm.smc.particles import History

_SURVIVING, _LOST = "#1f77b4", "#c8c8c8"


def history_figure(history: History) -> Figure:
    """Plot the genealogy, the weights and the effective sample size of a filter.

    In the upper plot, lines connect particles with their descendants, blue for the ancestors of
    the last particles and grey for others, and the area of a point is the particle's weight
    after the step. The lower plot shows the effective sample size before resampling.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.set_ylabel("particle")
    below.set_ylabel("effective\nsample size")
    below.set_xlabel("step")
    if not len(history):
        return figure
    size, steps = len(history[0].ancestors), np.arange(1, len(history) + 1)
    surviving = [np.zeros(size, bool) for _ in history]
    for flags, places in zip(surviving, history.ancestry, strict=True):
        flags[places] = True
    lines: list[list[tuple[int, int]]] = []
    lost_lines: list[list[tuple[int, int]]] = []
    for place in range(1, len(history)):
        for member, ancestor in enumerate(history[place].ancestors.tolist()):
            line = [(place, ancestor), (place + 1, member)]
            (lines if surviving[place][member] else lost_lines).append(line)
    above.add_collection(LineCollection(lost_lines, colors=_LOST, linewidths=0.5))
    above.add_collection(LineCollection(lines, colors=_SURVIVING, linewidths=0.9))
    for number, step, flags in zip(steps, history, surviving, strict=True):
        if np.isfinite(step.log_weights).any():
            weights = normalised_weights(step.log_weights)[step.ancestors]
            colors = np.where(flags, _SURVIVING, _LOST)
            areas = 12 * size * weights / max(1.0, weights.max() * size / 4)
            above.scatter(np.full(size, number), np.arange(size), areas, colors, zorder=3)
    above.set_xlim(0.5, len(history) + 0.5)
    above.set_ylim(-1, size)
    below.plot(steps, [step.effective_sample_size for step in history], color=_SURVIVING)
    below.set_ylim(0, size * 1.05)
    return figure
