"""The parts of `genlm compare`: what is asked, one engine's answers, how far they differ."""
