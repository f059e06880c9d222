"""The core: protocols, scheduler, caches, vocabularies and plugin discovery.

Import the public names from `genlm`; nothing below this package is a promise.
"""
