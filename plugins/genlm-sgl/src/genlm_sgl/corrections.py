"""`ModelCorrections`: corrects a model while SGLang loads it, or refuses the model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from genlm.plugin import (
    EvaluationError,
    ModelFacts,
    ModelLoadError,
    VerifiedFamilies,
    check_verified,
    describe_error,
)
from genlm_sgl.checkpoint import OUTPUT_BIAS, CheckpointBiases
from genlm_sgl.loading import MODEL_OVERRIDES
from genlm_sgl.model_checks import check_model, correct_model, rope_overrides
from genlm_sgl.served_model import ServedModel
from genlm_sgl.versions import check_version

_POST_BIAS_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of operations on logits that follow the output bias."""


class ModelCorrections:
    """Corrections of a model before, during and after loading.

    Args:
        config: The result of `read_text_config`.
        options: Arguments of `ServerArgs`.

    Attributes:
        options: The options, including those that correct the model.
        names: Descriptions of the corrected differences.
    """

    def __init__(self, config: Any | None, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.names: list[str] = []
        self._backend = options.get("attention_backend")
        self._config = config
        self._biases = CheckpointBiases()
        plain = rope_overrides(config, options.get("context_length"))
        for name, value in plain.items():
            setattr(config, name, value)
        if plain:
            overrides = json.loads(options.get(MODEL_OVERRIDES) or "{}")
            self.options[MODEL_OVERRIDES] = json.dumps(overrides | plain)
            self.names.append("rotary embeddings")

    def on_load_weights(
        self, module: torch.nn.Module, weights: Iterable[tuple[str, Any]]
    ) -> Iterator[tuple[str, Any]]:
        """Correct the built model and record the biases among the weights."""
        if self._config is not None:
            self.names += correct_model(module, self._config, self._backend)
        return self._biases.record(weights)

    def check_loaded(self, served: ServedModel, *, unverified: str) -> None:
        """Refuse a loaded model whose rows would be wrong; warn of an unverified family.

        Args:
            served: The loaded model; receives the output bias that SGLang omits.
            unverified: Whether to `"warn"` of or to `"refuse"` an unverified family.

        Raises:
            ModelLoadError: Rows would be wrong, or the family is refused.
            ValueError: `unverified` has another value.

        Warns:
            UnverifiedModelWarning: The family is unverified.
        """
        if self._config is None:
            self._config = served.text_config
        facts = ModelFacts.of(self._config)
        check_model(served, self._config, facts)
        self._check_biases(served, facts)
        if served.is_fallback:
            name = f"{facts.architecture} by SGLang's {type(served.model).__name__}"
            facts = dataclasses.replace(facts, architecture=name)
        verified = VerifiedFamilies.of_package("genlm_sgl")
        check_verified(f"SGLang {check_version()}", facts, verified, unverified=unverified)

    def replace_weights(self, served: ServedModel, weights: Mapping[str, Any]) -> None:
        """Replace the weights of a loaded model.

        Args:
            served: The loaded model; receives the output bias that SGLang omits.
            weights: All weights of the checkpoint by name.

        Raises:
            ValueError: The model is quantised; it is unchanged.
            EvaluationError: The weights do not fit the model, or contain NaN, or rows would be
                wrong. The model cannot be used afterwards.
        """
        served.require_loadable()
        self._biases = CheckpointBiases()
        try:
            served.load_weights(self._biases.record(weights.items()))
            served.output_bias = None
            self._check_biases(served, ModelFacts.of(self._config))
        except ValueError as error:
            raise EvaluationError(describe_error(error)) from error

    def _check_biases(self, served: ServedModel, facts: ModelFacts) -> None:
        layers = getattr(self._config, "num_hidden_layers", None)
        missing = self._biases.missing(
            served.vectors(), layers=layers or 2**31, dtype=served.dtype
        )
        bias = self._biases.output_bias
        if bias is not None:
            if any(getattr(self._config, name, None) for name in _POST_BIAS_SETTINGS):
                missing.append(OUTPUT_BIAS)
            served.output_bias = bias.to(served.device)
            self.names.append("output bias")
        if missing:
            raise ModelLoadError(
                f"SGLang {check_version()} drops {len(missing)} biases of the checkpoint, "
                f"which its model of {facts.architecture} does not have: "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Rows would be "
                f"wrong"
            )
