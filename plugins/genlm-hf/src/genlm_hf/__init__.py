"""Hugging Face transformers models as a genlm engine."""
