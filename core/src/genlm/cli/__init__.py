"""The `genlm` command."""
