"""Rows of log-probabilities, and their masks, draws, reductions, scores and output cache."""
