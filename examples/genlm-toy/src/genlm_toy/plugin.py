"""Registers the engine; imports nothing heavy."""

from genlm.plugin import BackendSpec, hookimpl


@hookimpl
def genlm_backends():
    """Describe the engine without importing torch."""
    check = "genlm_toy.conformance:target"
    yield BackendSpec("toy", "engine", "genlm_toy.engine:ToyEngine", conformance=check)
