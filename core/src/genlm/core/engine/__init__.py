"""The interface that engines implement, and how groups of sequences run on any of them."""
