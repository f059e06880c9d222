"""The `genlm` command: thin commands over public names.

Every command is a module with one function, which imports heavy libraries when it is called.
`app.py` lists the commands.
"""

from genlm.cli.app import app, main

__all__ = ["app", "main"]
