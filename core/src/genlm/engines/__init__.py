"""Utilities for authors of engines: models, adapters, memory and the state of a process.

Plugins import these names from `genlm.plugin`.
"""
