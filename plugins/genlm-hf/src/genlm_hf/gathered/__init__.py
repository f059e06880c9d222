"""Forward passes through a model's own cache, each sequence's past gathered from slots."""
