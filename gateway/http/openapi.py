"""The OpenAPI 3.1 document, made from the endpoints, and the schemas of what they take and answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter
from starlette.routing import BaseRoute, Mount

from gateway.answers.openai import OpenAIError
from gateway.answers.service import Detail
from gateway.futures import JSON
from gateway.http.endpoint import Endpoint
from tinsmith import __version__

Json = dict[str, Any]
_Mode = Literal["validation", "serialization"]

_REF = "#/components/schemas/{model}"
_OPENAI = "/v1/"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")

_MEANING = {
    400: "Something is wrong in the request; the text names the field and the value",
    401: "The key is missing or unknown",
    403: "Refused",
    404: "There is no such thing",
    410: "It is gone",
    413: "The body is larger than max_body_bytes",
    422: "The number was used by another request before",
    429: "Too much work; send it again later",
    503: "A service that is needed cannot be reached; send it again later",
}


def routes_of(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str, Endpoint]]:
    """Method in lower case, path and endpoint, of every route that belongs in the document."""
    for route in routes:
        if isinstance(route, Mount):
            yield from routes_of(route.routes, prefix + route.path)
        elif isinstance(route, Endpoint) and route.include_in_schema:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield method.lower(), prefix + route.path, route


class _Schemas:
    """Schemas of all bodies and answers, as components of the document."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        bodies = [each.takes for each in endpoints if each.takes is not None]
        answers = [
            Detail,
            OpenAIError,
            *(kind for each in endpoints for kind in (each.answers, each.unready) if kind is not None),
        ]
        inputs: list[tuple[Any, _Mode, TypeAdapter[Any]]] = []
        for types, mode in ((bodies, "validation"), (answers, "serialization")):
            inputs += [(each, mode, TypeAdapter(each)) for each in dict.fromkeys(types)]  # type: ignore[misc]
        found, rest = TypeAdapter.json_schemas(inputs, ref_template=_REF)
        self._found = {key: schema for (key, _), schema in found.items()}
        self.components: Json = rest.get("$defs", {})

    def of(self, kind: Any) -> Json:
        return self._found[kind]


def document(routes: Sequence[BaseRoute]) -> Json:
    """The document of the endpoints among these routes."""
    found = list(routes_of(routes))
    schemas = _Schemas([endpoint for *_, endpoint in found])
    paths: Json = {}
    names: Counter[str] = Counter()
    for method, path, endpoint in found:
        operation = _operation(path, endpoint, schemas)
        name = operation["operationId"]
        names[name] += 1
        if names[name] > 1:  # the function serves several paths
            operation["operationId"] = f"{name}.{names[name]}"
        paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tinsmith",
            "version": __version__,
            "description": "The Tinker API below /api/v1, and an OpenAI-compatible API below /v1.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "X-API-Key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                "Bearer": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{"X-API-Key": []}, {"Bearer": []}],
    }


def _operation(path: str, endpoint: Endpoint, schemas: _Schemas) -> Json:
    module = endpoint.endpoint.__module__.rpartition(".")[2]
    made: Json = {
        "operationId": f"{module}.{endpoint.endpoint.__name__}",
        "tags": [module],
        "summary": endpoint.summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
              for name in _PARAMETER.findall(path)),
            *(_query(endpoint.asks) if endpoint.asks is not None else ()),
        ],
        "responses": _responses(path, endpoint, schemas),
    }  # fmt: skip
    if endpoint.takes is not None or endpoint.also_takes:
        content = {JSON: {"schema": schemas.of(endpoint.takes)}} if endpoint.takes is not None else {}
        content |= {media_type: {"schema": schema} for media_type, schema in endpoint.also_takes.items()}
        made["requestBody"] = {"required": True, "content": content}
    if not endpoint.needs_key:
        made["security"] = []
    return made


def _query(query: type[BaseModel]) -> list[Json]:
    schema = query.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]


def _responses(path: str, endpoint: Endpoint, schemas: _Schemas) -> Json:
    content: Json = {} if endpoint.answers is None else {JSON: {"schema": schemas.of(endpoint.answers)}}
    content |= {media_type: {"schema": schema} for media_type, schema in endpoint.also_answers.items()}
    responses: Json = {str(endpoint.status): {"description": "Done", "content": content}} if content else {}
    statuses = {*endpoint.errors}
    if endpoint.takes is not None:
        statuses |= {400, 413}
    if endpoint.asks is not None:
        statuses.add(400)
    if endpoint.needs_key:
        statuses |= {401, 429}
    error = schemas.of(OpenAIError if path.startswith(_OPENAI) else Detail)
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _MEANING.get(status, HTTPStatus(status).phrase),
            "content": {JSON: {"schema": error}},
        }
    if endpoint.unready is not None:
        content = {JSON: {"schema": schemas.of(endpoint.unready)}}
        responses["503"] = {"description": "Not every service has been reached yet", "content": content}
    return responses
