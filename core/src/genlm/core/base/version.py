"""Version of the installed genlm-core."""

from importlib.metadata import version

__version__ = version("genlm-core")
