"""The smallest complete genlm plugin: bytes that repeat themselves."""
