"""Model families on which an engine was verified; a warning or an error for other models."""

from __future__ import annotations

import importlib.resources
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from genlm.core.base.errors import ModelLoadError
from genlm.engines.model_facts import ModelFacts

_CHOICES = ("warn", "refuse")


class UnverifiedModelWarning(UserWarning):
    """The family of a model was not compared with an unbatched forward pass."""


@dataclass(frozen=True)
class VerifiedFamilies:
    """Families on which an engine's rows were compared with an unbatched forward pass.

    Attributes:
        versions: Versions of the libraries in the comparison.
        errors: The largest difference in log-probability of each family, by `ModelFacts.key`.
    """

    versions: Mapping[str, str]
    errors: Mapping[str, float]

    @classmethod
    def of_package(cls, package: str) -> Self:
        """Read `verified.json` of an engine's package.

        Raises:
            FileNotFoundError: The package does not have the file.
        """
        text = importlib.resources.files(package).joinpath("verified.json").read_text("utf-8")
        return cls(**json.loads(text))


def check_causal(facts: ModelFacts) -> None:
    """Refuse a model whose config makes its attention bidirectional.

    Raises:
        ModelLoadError: The prediction after a token depends on later tokens, so the model has
            no next-token distribution.
    """
    if facts.bidirectional:
        raise ModelLoadError(
            f"{facts.architecture} with {facts.bidirectional} attends to later tokens, so it "
            f"is not a causal language model; use a decoder-only model, or change the setting "
            f"in the config if the model was trained as a decoder"
        )


def check_unverified_option(unverified: object) -> None:
    """Check the option `unverified` of an engine, before its model is loaded.

    Raises:
        ValueError: It is neither `"warn"` nor `"refuse"`.
    """
    if unverified not in _CHOICES:
        choices = " or ".join(map(repr, _CHOICES))
        raise ValueError(f"unverified={unverified!r}; expected {choices}")


def check_verified(
    engine: str, facts: ModelFacts, verified: VerifiedFamilies, *, unverified: str = "warn"
) -> None:
    """Warn about a model of a family that was not verified, or refuse it.

    A model with bidirectional attention is refused in any case; see `check_causal`.

    A family is an architecture with the mechanisms that the config enables: a plain Llama and
    one with dynamic rotary embeddings are two families. Dtype and quantisation are not part
    of it.

    Args:
        engine: The engine and its version, for the message.
        facts: Facts about the model.
        verified: The verified families.
        unverified: `"warn"` or `"refuse"`.

    Raises:
        ModelLoadError: The family was not verified, and `unverified` is `"refuse"`; or the
            model is not causal.
        ValueError: As `check_unverified_option`.

    Warns:
        UnverifiedModelWarning: The family was not verified.
    """
    check_unverified_option(unverified)
    check_causal(facts)
    if facts.key in verified.errors:
        return
    versions = ", ".join(f"{name} {version}" for name, version in verified.versions.items())
    message = (
        f"{engine}: the rows of {facts.key} were not verified; {len(verified.errors)} other "
        f"families were, with {versions}. Compare them with another engine's: "
        f"genlm compare MODEL --backends hf,..."
    )
    if unverified == "refuse":
        raise ModelLoadError(f"{message} unverified='warn' serves them nevertheless")
    warnings.warn(
        f"{message} unverified='refuse' refuses such models",
        UnverifiedModelWarning,
        stacklevel=2,
    )
