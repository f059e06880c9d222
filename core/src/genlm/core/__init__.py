"""The core: protocols, scheduler, caches, vocabularies and plugin discovery.

Import the public names from `genlm`; the modules of this package are not a stable interface.
"""
