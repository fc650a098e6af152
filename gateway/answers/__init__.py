"""Types of the gateway's answers, as routes send them and as the OpenAPI document describes them. `gateway/views.py`
and the routes of checkpoints and runs build answers of these types, which the type checker compares. Other handlers
build theirs without them; the fuzz tests compare all answers with the document."""

from gateway.answers import checkpoints, openai, records, service, training

__all__ = ["checkpoints", "openai", "records", "service", "training"]
