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
from genlm_sgl.model_checks import BuiltModel, check_model, correct_model, rope_overrides
from genlm_sgl.served_model import ServedModel
from genlm_sgl.versions import installed_version

_OVERRIDES = "json_model_override_args"

_POST_BIAS_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of operations on logits that follow the output bias."""


class ModelCorrections:
    """Corrections of a model before, during and after loading.

    Args:
        source: Folder or hub id.
        options: Arguments of `ServerArgs`.

    Attributes:
        options: The options, including those that correct the model.
        names: Descriptions of the corrected differences.
    """

    def __init__(self, source: str, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.names: list[str] = []
        overrides = json.loads(options.get(_OVERRIDES) or "{}")
        self._backend = options.get("attention_backend")
        self._config = _text_config(source, options, overrides)
        self._biases = CheckpointBiases()
        if self._config is None:
            return
        plain = rope_overrides(self._config, options.get("context_length"))
        for name, value in plain.items():
            setattr(self._config, name, value)
        if plain:
            self.options[_OVERRIDES] = json.dumps(overrides | plain)
            self.names.append("rotary embeddings")

    def on_load_weights(
        self, module: torch.nn.Module, weights: Iterable[tuple[str, Any]]
    ) -> Iterator[tuple[str, Any]]:
        """Correct the built model and record the biases among the weights."""
        if self._config is not None:
            self.names += correct_model(module, self._config, self._backend)
        return self._biases.record(weights)

    def check_loaded(self, served: ServedModel, max_context: int, *, unverified: str) -> None:
        """Refuse a loaded model whose rows would be wrong; warn of an unverified family.

        Args:
            served: The loaded model; receives the output bias that SGLang omits.
            max_context: Maximum number of tokens of a prompt.
            unverified: Whether to `"warn"` of or to `"refuse"` an unverified family.

        Raises:
            ModelLoadError: Rows would be wrong, or the family is refused.
            ValueError: `unverified` has another value.

        Warns:
            UnverifiedModelWarning: The family is unverified.
        """
        config = served.text_config if self._config is None else self._config
        facts = ModelFacts.of(config)
        check_model(
            BuiltModel(
                served.model,
                config,
                facts,
                served.attention_backends,
                max_context,
                served.is_fallback,
            )
        )
        self._check_biases(served, config, facts)
        if served.is_fallback:
            name = f"{facts.architecture} by SGLang's {type(served.model).__name__}"
            facts = dataclasses.replace(facts, architecture=name)
        verified = VerifiedFamilies.of_package("genlm_sgl")
        check_verified(f"SGLang {installed_version()}", facts, verified, unverified=unverified)

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
        config = served.text_config if self._config is None else self._config
        try:
            served.load_weights(self._biases.record(weights.items()))
            served.output_bias = None
            self._check_biases(served, config, ModelFacts.of(config))
        except ValueError as error:
            raise EvaluationError(describe_error(error)) from error

    def _check_biases(self, served: ServedModel, config: Any, facts: ModelFacts) -> None:
        layers = getattr(config, "num_hidden_layers", None)
        missing = self._biases.missing(served.model, layers=layers or 2**31, dtype=served.dtype)
        bias = self._biases.output_bias
        if bias is not None:
            if any(getattr(config, name, None) for name in _POST_BIAS_SETTINGS):
                missing.append(OUTPUT_BIAS)
            served.output_bias = bias.to(served.device)
            self.names.append("output bias")
        if missing:
            raise ModelLoadError(
                f"SGLang {installed_version()} drops {len(missing)} biases of the checkpoint, "
                f"which its model of {facts.architecture} does not have: "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Rows would be "
                f"wrong"
            )


def _text_config(
    source: str, options: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Any | None:
    """Read the config of a text model with transformers; None if that fails.

    SGLang's config is not used, because SGLang changes it. SGLang also reads formats that
    transformers does not read.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    arguments = {"revision": options.get("revision")}
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(source, **arguments)
        # SGLang registers its own classes with AutoConfig for some names.
        reader = getattr(
            transformers, CONFIG_MAPPING_NAMES.get(raw.get("model_type"), ""), None
        )
        if reader is None:
            reader = transformers.AutoConfig
            arguments["trust_remote_code"] = bool(options.get("trust_remote_code", False))
        config = reader.from_pretrained(source, **arguments)
    except Exception:  # noqa: BLE001 - SGLang reports the error
        return None
    for name, value in overrides.items():
        present = getattr(config, name, None)
        if isinstance(present, transformers.PretrainedConfig) and isinstance(value, dict):
            present.update(value)
        else:
            setattr(config, name, value)
    return config.get_text_config()
