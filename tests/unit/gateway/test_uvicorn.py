"""Internals of uvicorn on which gateway/http/connections.py and server.py rely.

A release that moves any of it fails here, by name, instead of in a server that no longer cuts off slow clients.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server

from gateway.http.connections import BoundedProtocol
from tests.unit.gateway.stack import Stack

ROOT = Path(__file__).parents[3]
PROTOCOL = {
    "app",
    "client",
    "config",
    "connections",
    "cycle",
    "flow",
    "headers",
    "loop",
    "pipeline",
    "scope",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
    "url",
}
"""Attributes of a connection."""
METHODS = {
    "on_message_begin",
    "on_headers_complete",
    "on_message_complete",
    "_unset_keepalive_if_required",
    "timeout_keep_alive_handler",
    "shutdown",
}
"""Methods of a connection that take nothing."""
CYCLE = {"disconnected", "message_event", "response_complete", "response_started"}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_one_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = next(each for each in project["optional-dependencies"]["gateway"] if each.startswith("uvicorn"))
    found = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", declared)
    assert found is not None, f"{declared}: both ends are needed, because private parts are used"
    assert int(found[1]) <= int(uvicorn.__version__.split(".")[1]) < int(found[2])


def test_the_methods_that_are_replaced_are_there_and_take_the_same() -> None:
    assert parameters(HttpToolsProtocol.__init__) == ["self", "config", "server_state", "app_state", "_loop"]
    assert parameters(HttpToolsProtocol.connection_made) == ["self", "transport"]
    assert "connection_lost" in vars(HttpToolsProtocol)
    assert parameters(HttpToolsProtocol.connection_lost) == ["self", "exc"]
    assert parameters(HttpToolsProtocol.data_received) == ["self", "data"]
    for name in METHODS:
        assert parameters(getattr(HttpToolsProtocol, name)) == ["self"], name
    assert parameters(Server.serve) == ["self", "sockets"]
    assert parameters(Server.shutdown) == ["self", "sockets"]
    assert parameters(Server.capture_signals) == ["self"]
    assert "self.capture_signals()" in inspect.getsource(Server.serve)
    assert "await self.shutdown(" in inspect.getsource(Server)
    # connections._Transport holds short writes back, so no other call may write.
    called = set(re.findall(r"transport\.(\w+)\(", inspect.getsource(httptools_impl)))
    assert called == {"close", "is_closing", "set_protocol", "write"}
    assert "app=self.app" in re.sub(r"\s", "", inspect.getsource(HttpToolsProtocol.on_headers_complete))


def test_every_inherited_name_that_is_used_is_looked_at_here() -> None:
    tree = ast.parse(inspect.getsource(BoundedProtocol))
    on_self = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    own = {node.attr for node in on_self if isinstance(node.ctx, ast.Store) and node.attr.startswith("_")}
    own |= vars(BoundedProtocol).keys() | BoundedProtocol.__annotations__.keys()
    assert {node.attr for node in on_self} - own - METHODS - PROTOCOL == set()


async def test_a_connection_has_what_is_read_and_set(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    assert stack.server is not None
    connections: set[Any] = stack.server.server_state.connections
    connection = next(each for each in connections if each.cycle is not None)
    assert {name for name in PROTOCOL if name not in vars(connection)} == set()
    assert isinstance(connection.url, bytes)
    assert isinstance(connection.flow.read_paused, bool)
    assert isinstance(connection.cycle, RequestResponseCycle)
    assert {name for name in CYCLE if name not in vars(connection.cycle)} == set()
    assert connection.config.loaded_app is not None
    assert connection.timeout_keep_alive_task.when() > 0
    assert connection.connections is connections
    assert isinstance(stack.server.servers[0].sockets[0].getsockname()[1], int)
    writer.close()
