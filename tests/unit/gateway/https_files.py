"""An https server with a picture and with answers that are none."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tinsmith_cli.make_certificates import make_certificates

HEADER = struct.pack(">8sI4sIIBBBBBI", b"\x89PNG\r\n\x1a\n", 13, b"IHDR", 37, 21, 8, 2, 0, 0, 0, 0)
"""The beginning of a PNG of 37 x 21 pixels."""
LOCAL = ["127.0.0.0/8", "::1/128"]


@dataclass
class Files:
    """An https server on this machine, with its name in `host`."""

    host: str
    asked: list[bytes] = field(default_factory=list)
    """The heads of all requests."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        self.asked.append(head)
        match head.split()[1].decode():
            case "/good.png?size=1":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(HEADER) + HEADER)
            case "/moved.png":
                where = f"https://{self.host}/good.png?size=1".encode()
                writer.write(b"HTTP/1.1 302 Found\r\nlocation: " + where + b"\r\ncontent-length: 0\r\n\r\n")
            case "/packed.png":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\n1")
            case "/endless.png":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while not writer.is_closing():
                    writer.write(bytes(2**20))
                    try:
                        await writer.drain()
                    except ConnectionError:
                        break
            case "/slow.png":
                await reader.read()
            case _:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()


@asynccontextmanager
async def serve_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Files]:
    """`folder`: gets the server's certificates, which the process then trusts."""
    make_certificates(folder, hosts=[])
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "gateway.pem", folder / "gateway-key.pem")
    made = Files("")
    server = await asyncio.start_server(lambda *streams: made.answer(*streams), "127.0.0.1", 0, ssl=tls)
    made.host = f"localhost:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()
