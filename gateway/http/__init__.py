"""HTTP: bodies, connections, routes and the OpenAPI document."""
