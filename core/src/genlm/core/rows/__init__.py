"""Rows and what is computed from them: masks, draws, reductions, scores, the output cache."""
