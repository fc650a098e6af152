"""`tinsmith plan` and the placement of `tinsmith up`: the GPUs and the memory of each service, before any service
starts. No weights are loaded, and torch only for a model of an unknown family (counted.py)."""
