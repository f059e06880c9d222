"""Why a model is not served from a prefix tree."""

from __future__ import annotations

__all__ = ["UnfitModelError"]


class UnfitModelError(ValueError):
    """The model does more with its past than attend to it; the message says what."""
