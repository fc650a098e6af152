"""The order of operations, and the compute thread."""
