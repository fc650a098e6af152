"""Losses, those of users included, and how far sampled logprobs are from the trainer's."""
