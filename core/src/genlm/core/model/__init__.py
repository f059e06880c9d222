"""What programs use: models, contexts, populations, and the requests that they make."""
