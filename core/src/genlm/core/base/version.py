"""Version of the installed genlm-core."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("genlm-core")
