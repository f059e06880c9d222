"""Plugin discovery: `spec` describes backends, `registry` reads plugins, `lookup` chooses.

This package uses only specs: it imports an engine's module only to return the engine.
"""
