"""Samples, and the samplers that draw them."""
