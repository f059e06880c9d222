"""Input of engines: token sequences, generations of populations, queries."""
