"""The sending end of the weight channel: one trainer, any number of samplers, one group at a time."""

from trainer_service.weight_sync.sender import Published, Version, WeightSender

__all__ = ["Published", "Version", "WeightSender"]
