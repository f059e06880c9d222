"""`ModelReview`: whether SGLang serves a model as its config says, judged while it loads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from genlm import ModelFacts, ModelLoadError, VerifiedFamilies, check_verified
from genlm_sgl.checkpoint import OUTPUT_BIAS, CheckpointVectors
from genlm_sgl.model_checks import BuiltModel, check_model, correct_model, rope_overrides
from genlm_sgl.scheduler_api import SchedulerApi
from genlm_sgl.versions import installed_version

__all__ = ["ModelReview"]

_OVERRIDES = "json_model_override_args"

_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of what a model does with its logits once the output bias was added."""


class ModelReview:
    """Follows a model from its config through SGLang's loading to what SGLang built.

    Args:
        source: Folder or hub id.
        options: Arguments of `ServerArgs`.

    Attributes:
        options: The same, with what makes the model right.
        corrections: What SGLang would have computed otherwise, in words.
    """

    def __init__(self, source: str, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.corrections: list[str] = []
        overrides = json.loads(options.get(_OVERRIDES) or "{}")
        self._backend = options.get("attention_backend")
        self._config = _text_config(source, options, overrides)
        stated = getattr(self._config, "quantization_config", None)
        self._vectors = CheckpointVectors(numbers=not (stated or options.get("quantization")))
        if self._config is None:
            return
        plain = rope_overrides(self._config, options.get("context_length"))
        for name, value in plain.items():
            setattr(self._config, name, value)
        if plain:
            self.options[_OVERRIDES] = json.dumps(overrides | plain)
            self.corrections.append("rotary embeddings")

    def watch_weights(
        self, module: torch.nn.Module, weights: Iterable[tuple[str, Any]]
    ) -> Iterator[tuple[str, Any]]:
        """Set right what the built model leaves out, and note what its weights bring."""
        if self._config is not None:
            self.corrections += correct_model(module, self._config, self._backend)
        return self._vectors.watching(weights)

    def finish(self, api: SchedulerApi, max_context: int, *, unverified: str) -> None:
        """Judge the loaded model.

        Args:
            api: SGLang with the model; gets the output bias that SGLang leaves out.
            max_context: The longest prompt that will be asked.
            unverified: `"warn"` or `"refuse"` a family that was never compared.

        Raises:
            ModelLoadError: Rows would be wrong, or the family is to be refused.
            ValueError: `unverified` is neither.

        Warns:
            UnverifiedModelWarning: The family was never compared.
        """
        config = api.text_config if self._config is None else self._config
        facts = ModelFacts.of(config)
        check_model(
            BuiltModel(
                api.model, config, facts, api.attention_backends, max_context, api.is_fallback
            )
        )
        self._check_vectors(api, config, facts)
        if api.is_fallback:
            name = f"{facts.architecture} by SGLang's {type(api.model).__name__}"
            facts = dataclasses.replace(facts, architecture=name)
        verified = VerifiedFamilies.of_package("genlm_sgl")
        check_verified(f"SGLang {installed_version()}", facts, verified, unverified=unverified)

    def _check_vectors(self, api: SchedulerApi, config: Any, facts: ModelFacts) -> None:
        layers = getattr(config, "num_hidden_layers", None)
        lost = self._vectors.lost(api.model, layers=layers or 2**31, dtype=api.dtype)
        bias = self._vectors.output_bias
        if bias is not None:
            if any(getattr(config, name, None) for name in _AFTER_THE_HEAD):
                lost.append(OUTPUT_BIAS)
            api.output_bias = bias.to(api.device)
            self.corrections.append("output bias")
        if lost:
            raise ModelLoadError(
                f"SGLang {installed_version()} drops {len(lost)} tensors of the checkpoint, "
                f"which its model of {facts.architecture} has no place for or rounds: "
                f"{', '.join(lost[:4])}{', ...' if len(lost) > 4 else ''}. Rows would be wrong"
            )


def _text_config(
    source: str, options: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Any | None:
    """Read the config of a text model as transformers does; None if it cannot.

    SGLang reads some formats that transformers does not, and changes the config on its way.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    where = {"revision": options.get("revision")}
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(source, **where)
        # SGLang gives AutoConfig classes of its own for some names.
        reader = getattr(
            transformers, CONFIG_MAPPING_NAMES.get(raw.get("model_type"), ""), None
        )
        if reader is None:
            reader = transformers.AutoConfig
            where["trust_remote_code"] = bool(options.get("trust_remote_code", False))
        config = reader.from_pretrained(source, **where)
    except Exception:  # noqa: BLE001 - SGLang tells what is wrong with it
        return None
    for name, value in overrides.items():
        found = getattr(config, name, None)
        if isinstance(found, transformers.PretrainedConfig) and isinstance(value, dict):
            found.update(value)
        else:
            setattr(config, name, value)
    return config.get_text_config()
