"""Types of the gateway's answers. A handler's signature names the type of its answer (gateway/http/endpoint.py).

The type checker compares the two, and the OpenAPI document describes the type. OpenAI's completions are made as they
stream, without these types. The fuzz tests compare them with the document.
"""

from gateway.answers import checkpoints, openai, records, service, trainers, training

__all__ = ["checkpoints", "openai", "records", "service", "trainers", "training"]
