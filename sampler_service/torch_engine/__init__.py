"""Our own engine: continuous batching on the modelling code that the trainer runs."""
