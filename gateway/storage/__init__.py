"""Checkpoints: their index, what comes and goes, and what is deleted."""
