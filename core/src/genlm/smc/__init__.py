"""Sequential Monte Carlo: the particle filter `steer`, weights and resampling."""

from genlm.smc.particles import History, Particles, Step
from genlm.smc.resampling import (
    effective_sample_size,
    normalised_weights,
    resampled,
    systematic_resampling,
)
from genlm.smc.steering import steer, steer_sync

__all__ = [
    "History",
    "Particles",
    "Step",
    "effective_sample_size",
    "normalised_weights",
    "resampled",
    "steer",
    "steer_sync",
    "systematic_resampling",
]
