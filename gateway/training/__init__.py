"""Training operations: from the client's request through the trainer to the stored answer."""
