"""Registers the engine."""
