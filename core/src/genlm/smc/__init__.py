"""Sequential Monte Carlo: the particle filters `steer` and `batch_steer`, and resampling."""

from genlm.smc.particles import BatchStep, History, Particles, ParticlesBatch, Step
from genlm.smc.resampling import (
    batch_resampled,
    effective_sample_size,
    normalised_weights,
    resampled,
    systematic_resampling,
)
from genlm.smc.steering import batch_steer, batch_steer_sync, steer, steer_sync

__all__ = [
    "BatchStep",
    "History",
    "Particles",
    "ParticlesBatch",
    "Step",
    "batch_resampled",
    "batch_steer",
    "batch_steer_sync",
    "effective_sample_size",
    "normalised_weights",
    "resampled",
    "steer",
    "steer_sync",
    "systematic_resampling",
]
