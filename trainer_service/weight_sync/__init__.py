"""The sending end of the weight channel: one trainer sends to any number of samplers, in one group at a time."""

from trainer_service.weight_sync.sender import Published, Version, WeightSender

__all__ = ["Published", "Version", "WeightSender"]
