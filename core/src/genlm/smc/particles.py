"""`Particles` of a filter after a step, and the `History` of the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from genlm.core.base.error_handling import import_required
from genlm.smc.resampling import Floats, RelativeWeights, normalised_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from genlm.core.model.lm import AsyncLM
    from genlm.core.model.population import Population

_MAX_PRINTED = 10
"""Maximum number of distinct texts in the printed form."""
_MAX_WIDTH = 100
"""Maximum number of characters of a text in the printed form."""


class Step(NamedTuple):
    """Tokens, weights and ancestors of one step of a filter.

    Attributes:
        token_ids: The token appended to each particle of the previous step, shape `(n,)`,
            int64; -1 for no token.
        log_weights: Log-weights of these particles before resampling, shape `(n,)`.
        finished: Whether these particles are finished, shape `(n,)`, bool.
        ancestors: Index of each resampled particle's ancestor among these, shape `(n,)`, int64:
            0 to n - 1 if there was no resampling.
        is_resampled: Whether the particles were resampled after the step, which makes their
            weights equal. Each particle can be its own ancestor, so `ancestors` do not tell.
    """

    token_ids: npt.NDArray[np.int64]
    log_weights: Floats
    finished: npt.NDArray[np.bool_]
    ancestors: npt.NDArray[np.int64]
    is_resampled: bool = False

    @property
    def log_evidence(self) -> float:
        """Log of the mean weight."""
        return float(RelativeWeights.of(self.log_weights).log_mean)

    @property
    def effective_sample_size(self) -> float:
        """Effective sample size before resampling; 0 if all weights are 0."""
        return float(RelativeWeights.of(self.log_weights).effective_size)


class BatchStep(NamedTuple):
    """One step of several filters; the attributes are those of `Step`.

    Attributes:
        token_ids: Shape `(filters, size)`.
        log_weights: Shape `(filters, size)`.
        finished: Shape `(filters, size)`.
        ancestors: Indices among the particles of the same filter, shape `(filters, size)`.
        is_resampled: Shape `(filters,)`, bool.
    """

    token_ids: npt.NDArray[np.int64]
    log_weights: Floats
    finished: npt.NDArray[np.bool_]
    ancestors: npt.NDArray[np.int64]
    is_resampled: npt.NDArray[np.bool_]

    def of(self, place: int) -> Step:
        """Return the step of one filter."""
        token_ids, log_weights, finished, ancestors, is_resampled = self
        return Step(
            token_ids[place],
            log_weights[place],
            finished[place],
            ancestors[place],
            bool(is_resampled[place]),
        )


class History(Sequence[Step]):
    """The steps of a filter that led to some particles, in order; immutable."""

    def __init__(self, steps: Sequence[BatchStep] = (), place: int = 0, size: int = 0) -> None:
        self._steps = steps
        self._place = place
        self._size = size  # number of particles

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> Step | History:
        if isinstance(index, slice):
            return History(self._steps[index], self._place, self._size)
        return self._steps[index].of(self._place)

    @property
    def ancestry(self) -> npt.NDArray[np.int64]:
        """Index of each current particle's ancestor after each step.

        Shape `(steps, n)`, int64; the last row is 0 to n - 1.
        """
        if not self._steps:
            return np.empty((0, self._size), np.int64)
        places = [np.arange(self._size)]
        for step in self[:0:-1]:
            places.append(step.ancestors[places[-1]])
        return np.stack(places[::-1])

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Tokens that the steps appended to each current particle, -1 for no token.

        Shape `(n, steps)`, int64.
        """
        columns = [
            step.token_ids[step.ancestors[places]]
            for step, places in zip(self, self.ancestry, strict=True)
        ]
        return np.stack(columns, axis=1) if columns else np.empty((self._size, 0), np.int64)

    def to_pandas(self) -> DataFrame:
        """Return a table with a row for each step.

        Returns:
            Columns `log_evidence`, `effective_sample_size`, `is_resampled`, `alive` (number of
            particles with non-zero weights) and `finished` (number of finished particles among
            them).

        Raises:
            MissingRequirementError: pandas is not installed.
        """
        rows = [
            {
                "log_evidence": step.log_evidence,
                "effective_sample_size": step.effective_sample_size,
                "is_resampled": step.is_resampled,
                "alive": int(np.isfinite(step.log_weights).sum()),
                "finished": int((step.finished & np.isfinite(step.log_weights)).sum()),
            }
            for step in self
        ]
        index = range(1, len(rows) + 1)
        columns = ["log_evidence", "effective_sample_size", "is_resampled", "alive", "finished"]
        table = import_required("pandas", "to_pandas").DataFrame(rows, index, columns)
        return table.rename_axis("step")

    def plot(self) -> Figure:
        """Plot the genealogy of the particles, their weights and the effective sample size.

        Returns:
            A matplotlib figure; its method `savefig` writes a file.

        Raises:
            MissingRequirementError: matplotlib is not installed.
        """
        import_required("matplotlib", "plot")
        from genlm.smc.plots import history_figure

        return history_figure(self)

    def __repr__(self) -> str:
        lines = ["step  log-evidence  effective  alive  finished"]
        for number, step in enumerate(self, 1):
            alive = np.isfinite(step.log_weights)
            mark = " resampled" if step.is_resampled else ""
            lines.append(
                f"{number:4}  {step.log_evidence:12.4f}  {step.effective_sample_size:9.1f}  "
                f"{int(alive.sum()):5}  {int((step.finished & alive).sum()):8}{mark}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, repr=False, eq=False)
class Particles:
    """The particles of a filter after a step; `print` shows those of the largest weights.

    Attributes:
        population: The sequences, including the prompt and the flags `population.finished`.
        log_weights: Shape `(n,)`, float64; `-inf` for particles that cannot be continued.
        history: All steps, including the last one.
        llm: The model.
    """

    population: Population
    log_weights: Floats
    history: History
    llm: AsyncLM

    @property
    def ancestors(self) -> npt.NDArray[np.int64]:
        """Index of each particle's ancestor in the previous step, shape `(n,)`, int64."""
        return self.history[-1].ancestors if self.history else np.arange(len(self))

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The token appended to each particle of the previous step, before resampling.

        Shape `(n,)`, int64; -1 for no token.
        """
        return self.history[-1].token_ids if self.history else np.full(len(self), -1)

    @property
    def log_evidence(self) -> float:
        """Log of the mean weight; its exponential is an unbiased estimate of the evidence.

        With a constraint and no potential, the evidence is the probability that a sample of the
        unconstrained model satisfies the constraint for the same number of tokens.
        """
        return float(RelativeWeights.of(self.log_weights).log_mean)

    @property
    def weights(self) -> Floats:
        """Normalised weights, shape `(n,)`, float64; all 0 if no particle can be continued."""
        if np.isneginf(self.log_weights).all():
            return np.zeros(len(self))
        return normalised_weights(self.log_weights)

    @property
    def effective_sample_size(self) -> float:
        """Effective sample size; 0 if all weights are 0."""
        return float(RelativeWeights.of(self.log_weights).effective_size)

    @property
    def texts(self) -> list[str]:
        """Texts of the particles after the prompt, without special tokens."""
        return self.llm.batch_decode(self.history.token_ids)

    @property
    def text_weights(self) -> dict[str, float]:
        """Sum of the normalised weights of the particles with each text, the largest first.

        The texts of unfinished particles are the beginnings drawn so far. All sums are 0 if no
        particle can be continued.
        """
        sums: dict[str, float] = {}
        for text, weight in zip(self.texts, self.weights.tolist(), strict=True):
            sums[text] = sums.get(text, 0.0) + weight
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_pandas(self) -> DataFrame:
        """Return a table with a row for each particle.

        Returns:
            Columns `text` (after the prompt), `weight`, `log_weight`, `tokens` (number of
            tokens after the prompt), `finished` and `ancestor`. Weights are normalised, or all
            0 if no particle can be continued.

        Raises:
            MissingRequirementError: pandas is not installed.
        """
        columns = {
            "text": self.texts,
            "weight": self.weights,
            "log_weight": self.log_weights,
            "tokens": (self.history.token_ids >= 0).sum(1),
            "finished": self.population.finished.numpy(),
            "ancestor": self.ancestors,
        }
        return import_required("pandas", "to_pandas").DataFrame(columns).rename_axis("particle")

    def plot(self) -> Figure:
        """Plot the genealogy of the particles; see `History.plot`.

        Raises:
            MissingRequirementError: matplotlib is not installed.
        """
        return self.history.plot()

    def __len__(self) -> int:
        return len(self.log_weights)

    def __repr__(self) -> str:  # without texts: `asyncio.run` formats results
        return f"<Particles: {self._summary()}>"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Show the texts in notebooks."""
        printer.text(str(self))

    def _summary(self) -> str:
        dead = np.isneginf(self.log_weights)
        finished = int((self.population.finished.numpy() & ~dead).sum())
        state = f"{finished} finished" + (f", {int(dead.sum())} dead" if dead.any() else "")
        return (
            f"{len(self)} particles after {len(self.history)} steps, {state}: "
            f"log-evidence {self.log_evidence:.4f}, effective sample size "
            f"{self.effective_sample_size:.1f}"
        )

    def __str__(self) -> str:
        counts, weights = Counter(self.texts), self.text_weights
        lines = [self._summary(), "weight  particles  text"]
        for text, weight in list(weights.items())[:_MAX_PRINTED]:
            lines.append(f"{weight:6.4f}  {counts[text]:9}  {_truncate(text)!r}")
        if len(weights) > _MAX_PRINTED:
            lines.append(f"... {len(weights) - _MAX_PRINTED} more texts")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False, eq=False)
class ParticlesBatch(Sequence[Particles]):
    """The particles of several filters after a step: a sequence of `Particles`, one for each.

    Attributes:
        population: The sequences of all filters, `size` members for each filter, in order.
        log_weights: Shape `(filters, size)`, float64; `-inf` for particles that cannot be
            continued.
        steps: All steps of all filters. In steps after the last one of a filter, its particles
            have token -1 and the same weights.
        step_counts: Number of steps that each filter has made, shape `(filters,)`, int64.
        llm: The model.
    """

    population: Population
    log_weights: Floats
    steps: tuple[BatchStep, ...]
    step_counts: npt.NDArray[np.int64]
    llm: AsyncLM

    @property
    def size(self) -> int:
        """Number of particles of each filter."""
        return int(self.log_weights.shape[1])

    @property
    def log_evidence(self) -> Floats:
        """`Particles.log_evidence` of each filter, shape `(filters,)`, float64."""
        return RelativeWeights.of(self.log_weights).log_mean

    def to_pandas(self) -> DataFrame:
        """Return a table with a row for each particle of each filter.

        Returns:
            The columns of `Particles.to_pandas`, indexed by `filter` and `particle`.

        Raises:
            MissingRequirementError: pandas is not installed.
        """
        tables = {place: particles.to_pandas() for place, particles in enumerate(self)}
        return import_required("pandas", "to_pandas").concat(tables, names=["filter"])

    def __len__(self) -> int:
        return len(self.log_weights)

    @overload
    def __getitem__(self, index: int) -> Particles: ...
    @overload
    def __getitem__(self, index: slice) -> list[Particles]: ...
    def __getitem__(self, index: int | slice) -> Particles | list[Particles]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        begin, population = place * self.size, self.population
        if len(self) > 1:
            population = population[begin : begin + self.size]
        history = History(self.steps[: self.step_counts[place]], place, self.size)
        return Particles(population, self.log_weights[place], history, self.llm)

    def __repr__(self) -> str:
        finished = self.population.finished.reshape(-1, self.size).all(1)
        return (
            f"<ParticlesBatch: {len(self)} filters of {self.size} particles after "
            f"{len(self.steps)} steps, {int(finished.sum())} finished>"
        )


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_WIDTH else f"{text[: _MAX_WIDTH - 3]}..."
