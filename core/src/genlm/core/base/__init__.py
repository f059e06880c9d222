"""Errors, checks of arguments, statistics and blocking methods, used by all other packages."""
