"""The public surface as it is: read from the gateway's routes and the installed SDK."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import click
import tinker
from starlette.routing import BaseRoute, Mount, Route
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces import AdminClient, RestClient

from gateway.http.app import ROUTES

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient, AdminClient)


def methods() -> list[str]:
    """Class.method of everything that a user of the SDK can call."""
    return [
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name, member in inspect.getmembers(client)
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    ]


def commands() -> list[str]:
    return list(_commands(main_cli, ["tinker"]))


def _commands(command: click.Command, words: Sequence[str]) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield " ".join(words)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _commands(found, [*words, name])


def endpoints() -> list[str]:
    """METHOD path of every route of the gateway."""
    return sorted(_endpoints(ROUTES, ""), key=lambda endpoint: endpoint.split()[::-1])


def _endpoints(routes: Sequence[BaseRoute], prefix: str) -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield from _endpoints(route.routes, prefix + route.path)
        elif isinstance(route, Route) and not route.path.endswith("{path:path}"):  # those refuse what is left
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield f"{method} {prefix}{route.path}"
