"""The figures of `python -m benchmarks trainer`."""
