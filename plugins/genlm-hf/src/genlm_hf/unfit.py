"""What a tier says of a model that it cannot serve; the next one is tried then."""

from __future__ import annotations

__all__ = ["UnfitMaskError", "UnfitModelError"]


class UnfitModelError(ValueError):
    """A model that differs from what a tier can serve; says in what."""


class UnfitMaskError(UnfitModelError):
    """A model that lets tokens see otherwise than causally or through a window."""
