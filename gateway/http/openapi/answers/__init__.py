"""What the gateway answers with, for the document. Handlers write these objects themselves; the fuzz tests hold their
answers against this."""

from gateway.http.openapi.answers import checkpoints, openai, records, service, training

__all__ = ["checkpoints", "openai", "records", "service", "training"]
