"""The computation: packed micro-batches, optimizers, and the memory that they may take."""
