"""The figures of `python -m benchmarks service`."""
