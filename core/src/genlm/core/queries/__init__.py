"""What an engine receives: token sequences, populations as arrays, queries."""
