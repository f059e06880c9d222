"""llama.cpp as a genlm engine: GGUF files, every prefix computed once."""
