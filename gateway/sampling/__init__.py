"""Samples, the samplers that generate them, and the publishing of versions to samplers."""
