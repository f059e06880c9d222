"""Registers the engine; imports nothing heavy."""

from genlm import BackendSpec, hookimpl


@hookimpl
def genlm_backends():
    """Describe the engine without importing torch."""
    yield BackendSpec(
        name="toy",
        kind="engine",
        target="genlm_toy.engine:ToyEngine",
        conformance="genlm_toy.conformance:target",
    )
