"""The order of operations, and what the compute thread does next."""
