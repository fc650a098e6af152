"""The OpenAPI document of the gateway."""
