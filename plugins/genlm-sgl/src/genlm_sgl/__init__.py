"""SGLang as a genlm engine."""
