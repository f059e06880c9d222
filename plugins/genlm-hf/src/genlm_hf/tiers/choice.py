"""Which tier serves a model: by rules first, then by comparing answers.

No flag of a config tells which models a faster tier serves rightly, so a tier must
pass rules on what was seen of the model and then give the rows of unbatched
forward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from genlm import ModelLoadError
from genlm_hf.gathered.forward import GatheredForward, read_cache
from genlm_hf.packed.forward import PackedForward, takes_positions
from genlm_hf.packed.layout import AttentionLayout, read_layout
from genlm_hf.rope import depends_on_longest
from genlm_hf.tiers.cached import CachedTier, StoredForward
from genlm_hf.tiers.known import KnownTiers
from genlm_hf.tiers.padded import PaddedTier
from genlm_hf.tiers.self_test import SelfTest
from genlm_hf.tiers.tier import ServedModel, Tier
from genlm_hf.unfit import UnfitMaskError, UnfitModelError

__all__ = ["ServeOptions", "TierChoice", "choose_tier"]

_logger = logging.getLogger("genlm_hf")

# Kinds of layers that see their whole past, or the end of it.
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention", "sliding"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve; the fields are `HFEngine`'s arguments.

    Raises:
        ValueError: A limit makes no sense.
    """

    max_tokens_per_batch: int | None = None
    kv_budget_bytes: int | None = None
    tier: str | None = None
    self_test: bool = True
    prepack: bool = True

    def __post_init__(self) -> None:
        most = self.max_tokens_per_batch
        if most is not None and not (isinstance(most, int) and most >= 1):
            raise ValueError(f"max_tokens_per_batch={most!r}; a whole number, at least 1")
        budget = self.kv_budget_bytes
        if budget is not None and not (isinstance(budget, int) and budget >= 0):
            raise ValueError(f"kv_budget_bytes={budget!r}; a whole number of bytes, at least 0")


@dataclass(frozen=True, slots=True)
class TierChoice:
    """The tier that serves, and why.

    Attributes:
        tier: Computes the rows.
        reason: Why no faster one was taken, or that it was asked for.
        error: Largest difference to an unbatched forward pass in the self-test, in
            log-probability; None if there was none.
    """

    tier: Tier
    reason: str
    error: float | None

    def statistics(self) -> Mapping[str, int | float | str]:
        """Return the choice as figures."""
        error = {} if self.error is None else {"self_test_error": self.error}
        return {"tier": self.tier.name, "tier_reason": self.reason, **error}


def choose_tier(served: ServedModel, options: ServeOptions) -> TierChoice:
    """Return the fastest tier that gives the right rows, or the one asked for.

    Raises:
        ModelLoadError: The model is no causal language model, or the tier asked for
            cannot serve it.
        ValueError: There is no tier of the name asked for.
    """
    faster: dict[str, Callable[[ServedModel, PaddedTier], StoredForward]] = {
        "packed": _packed,
        "gathered": _gathered,
    }
    if options.tier not in {None, "padded", *faster}:
        names = ", ".join(map(repr, [*faster, "padded"]))
        raise ValueError(f"no tier {options.tier!r}; the tiers are {names}, None chooses")
    padded = PaddedTier(served)
    wanted = [name for name in faster if options.tier in {None, name}]
    refusals = []
    test = SelfTest(served, padded) if options.self_test and wanted else None
    for name in wanted:
        try:
            forward = faster[name](served, padded)
            tier = CachedTier(
                name,
                served,
                forward,
                padded=padded,
                kv_budget_bytes=options.kv_budget_bytes,
            )
            error = None if test is None else test.largest_error(tier)
        except UnfitModelError as unfit:
            if options.tier is not None:
                raise ModelLoadError(
                    f"tier={name!r} cannot serve {type(served.model).__name__}: {unfit}"
                ) from unfit
            refusals.append(f"not {name}: {unfit}")
        else:
            return _chosen(TierChoice(tier, _reason(options, refusals), error), served, options)
    return _chosen(TierChoice(padded, _reason(options, refusals), None), served, options)


def _reason(options: ServeOptions, refusals: list[str]) -> str:
    if options.tier is not None:
        return "asked for"
    return "; ".join(refusals) or "the fastest"


def _chosen(choice: TierChoice, served: ServedModel, options: ServeOptions) -> TierChoice:
    measured = "not tested" if choice.error is None else f"self-test error {choice.error:.1e}"
    _logger.info(
        "%s is served by tier %r (%s; %s)",
        type(served.model).__name__,
        choice.tier.name,
        choice.reason,
        measured,
    )
    known = KnownTiers.shipped().faster(served.model, choice.tier.name)
    if options.tier is None and known is not None:
        # Logged, not warned: programs that turn warnings into errors still get right rows,
        # and Python prints records of this level where logging is not configured.
        _logger.warning(
            "%s is served by tier %r, much slower than it could be: models of its kind were "
            "served by tier %s. Rows are right. Reason: %s. Install the versions named, or "
            "report this; tier=%r accepts it without this message",
            type(served.model).__name__,
            choice.tier.name,
            known,
            choice.reason,
            choice.tier.name,
        )
    return choice


def _packed(served: ServedModel, padded: PaddedTier) -> PackedForward:
    """Return how to run the packed tier.

    Raises:
        UnfitModelError: The model breaks one of the rules.
    """
    if not takes_positions(served.model):
        raise UnfitModelError("its forward takes no position_ids")
    _refuse_by_config(served)
    layout = _layout(served, padded)
    _refuse_few_layers(served, len(layout.layers), "use transformers' attention interface")
    return PackedForward(served.model, layout, served.device)


def _gathered(served: ServedModel, padded: PaddedTier) -> GatheredForward:
    """Return how to run the gathered tier.

    Raises:
        UnfitModelError: The model breaks one of the rules.
    """
    _refuse_by_config(served)
    if not padded.pads:
        raise UnfitModelError("padding changes its rows")
    try:
        _layout(served, padded)
    except UnfitMaskError:
        raise
    except UnfitModelError:
        pass  # it attends in its own way, which is its own business here
    shapes = read_cache(served, _probe_length(served))
    _refuse_few_layers(served, len(shapes), "keep keys and values")
    return GatheredForward(served, shapes)


def _layout(served: ServedModel, padded: PaddedTier) -> AttentionLayout:
    return read_layout(served.model, lambda: padded.logits([[0] * _probe_length(served)]))


def _probe_length(served: ServedModel) -> int:
    return min(3, served.max_context or 3)


def _refuse_by_config(served: ServedModel) -> None:
    config = served.model.config.get_text_config()
    if depends_on_longest(config):
        raise UnfitModelError("its rotary embedding depends on the longest sequence")
    others = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if others:
        raise UnfitModelError(f"it has layers of kind {', '.join(sorted(map(str, others)))}")


def _refuse_few_layers(served: ServedModel, count: int, what: str) -> None:
    config = served.model.config.get_text_config()
    expected = getattr(config, "num_hidden_layers", None)
    if not count or count != expected:
        raise UnfitModelError(f"{count} of its {expected} layers {what}")
