"""Types of the gateway's answers, for the OpenAPI document. Handlers build their answers without them; the fuzz tests
compare the answers with these types."""

from gateway.http.openapi.answers import checkpoints, openai, records, service, training

__all__ = ["checkpoints", "openai", "records", "service", "training"]
