"""Registers the reference engine."""
