"""The `genlm` command: thin commands over public names.

Each command is a module of its own with one function, and imports what is heavy
inside that function. `app.py` lists them.
"""

from genlm.cli.app import app, main

__all__ = ["app", "main"]
