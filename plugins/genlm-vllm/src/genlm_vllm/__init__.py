"""vLLM as a genlm engine. Importing this package imports neither vLLM nor torch."""
