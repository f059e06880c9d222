"""Keys and values of computed tokens: slots, the tree over them, their storage."""
