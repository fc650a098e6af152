"""Measured speed and memory: `python -m benchmarks` lists the commands, README.md says how to read them."""
