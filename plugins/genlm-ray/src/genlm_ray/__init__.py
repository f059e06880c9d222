"""Replicas of an engine on Ray, private or served to several programs, as a genlm engine."""
