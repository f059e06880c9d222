"""Plugin discovery: `spec` describes backends, `registry` reads plugins, `lookup` selects one.

The package reads specs only; it imports an engine's module only to return the engine.
"""
