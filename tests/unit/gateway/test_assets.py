"""Pictures that a request names by a location: what is read, and what a client cannot reach."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Gauge

from gateway.assets import Assets
from gateway.config import GatewayConfig
from gateway.load import Bodies, Share
from tests.unit.gateway.https_files import HEADER, LOCAL, Files, serve_files
from tests.unit.gateway.stack import Client, Stack, sample_body
from tinsmith.errors import InvalidRequest, OutOfCapacity, Unsupported
from tinsmith.pictures.headers import MAX_BYTES
from tinsmith.v1 import trainer_pb2

NEW_LOOP = asyncio.new_event_loop
"""uvloop has a resolver of its own, and does not ask socket.getaddrinfo, which these tests replace."""


@pytest.fixture
async def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Files]:
    async with serve_files(tmp_path / "certificates", monkeypatch) as files:
        yield files


def assets(**settings: Any) -> Assets:
    return Assets(GatewayConfig(**settings))


def share(max_bytes: int = 2**30) -> Share:
    return Share(Bodies(max_bytes, Gauge("held", "Bytes", registry=None)), "ada")


async def read(assets: Assets, location: Any, **fields: Any) -> dict[str, Any]:
    """The chunk that the pointer becomes."""
    chunk = {"type": "image_asset_pointer", "location": location, "format": "png", **fields}
    await assets.fill([("c", chunk)], share())
    return chunk


PICTURE = {"type": "image", "format": "png", "data": HEADER}


async def test_pictures_come_from_a_listed_host_a_folder_or_the_location_itself(files: Files, tmp_path: Path) -> None:
    (tmp_path / "pictures/a").mkdir(parents=True)
    (tmp_path / "pictures/a/b c.png").write_bytes(HEADER)
    made = assets(image_hosts=[files.host], image_networks=LOCAL, image_folder=tmp_path / "pictures")
    url = f"https://{files.host}/good.png?size=1"
    for location in (
        url,
        "a/b c.png",
        str(tmp_path / "pictures/a/b c.png"),
        f"file://{tmp_path}/pictures/a/b%20c.png",
        "data:image/png;base64," + base64.b64encode(HEADER).decode(),
    ):
        assert await read(made, location, expected_tokens=15) == {**PICTURE, "expected_tokens": 15}
    assert f"\r\nhost: {files.host}\r\n".encode() in files.asked[0].lower()
    assert b"authorization" not in files.asked[0].lower()
    chunks = [{"location": url}, {"location": url, "format": "png"}]
    await made.fill([("c", chunk) for chunk in chunks], share())
    assert len(files.asked) == 2  # both chunks by one fetch


async def test_by_default_nothing_is_read() -> None:
    for location, setting in (("https://example.org/a.png", "image_hosts"), ("a.png", "image_folder")):
        with pytest.raises(Unsupported, match=rf"c\.location: '{location}' is not .* this server.* {setting}"):
            await read(assets(), location)


REFUSED = [
    ("/moved.png", "302; redirects are not followed"),
    ("/missing.png", "status 404"),
    ("/packed.png", "compressed body"),
    ("/endless.png", f"more than {MAX_BYTES} bytes"),
    ("/slow.png", "not fetched within 2 s"),
]


@pytest.mark.parametrize(("path", "reason"), REFUSED)
async def test_an_answer_that_is_no_picture_of_that_place_is_refused(files: Files, path: str, reason: str) -> None:
    timeout_s = 2.0 if path == "/slow.png" else 60.0
    made = assets(image_hosts=[files.host], image_networks=LOCAL, image_timeout_s=timeout_s)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await read(made, f"https://{files.host}{path}")
    assert caught.value.metadata["field"] == "c.location"
    assert len(files.asked) == 1


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("https://other.example/a.png", "'other.example', which is not one of this server's image_hosts"),
        ("https://pictures.example:8443/a.png", "'pictures.example:8443', which is not one"),
        ("https://pictures.example@other.example/a.png", "'other.example', which is not one"),
        ("https://user:secret@pictures.example/a.png", "which is not one"),
        ("https://pictures.example.other.example/a.png", "which is not one"),
        ("https://pictures.example:99999/a.png", "is no URL"),
        ("https://[::1", "is no URL"),
        ("http://pictures.example/a.png", "is no https: URL"),
        ("ftp://pictures.example/a.png", "is no https: URL"),
        ("https://pictures.example/" + "a" * 2048, "at most 2048"),
        ("data:image/gif;base64,AAAA", "is no data URL of a 'png'"),
        ("data:image/jpeg;base64,AAAA", "is no data URL of a 'png'"),
        ("data:image/png;base64,!", "is not base64"),
        ("", "is no location"),
        (7, "is no location"),
    ],
)
async def test_a_location_that_is_not_allowed_is_refused(location: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason.replace("[", r"\[")):
        await read(assets(image_hosts=["pictures.example"]), location)


def resolving(*addresses: str) -> Callable[..., list[Any]]:
    """A resolver that gives every name these addresses."""
    kinds = {False: socket.AF_INET, True: socket.AF_INET6}
    return lambda host, port, *_, **__: [
        (kinds[":" in one], socket.SOCK_STREAM, 6, "", (one, port, 0, 0)[: 4 if ":" in one else 2]) for one in addresses
    ]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1",
        "64:ff9b::a00:1", "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
async def test_an_address_that_is_not_public_is_never_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the same name has a public address, too."""
    for addresses in ([address], ["93.184.215.14", address]):
        monkeypatch.setattr(socket, "getaddrinfo", resolving(*addresses))
        with pytest.raises(InvalidRequest, match="private or reserved network"):
            await read(assets(image_hosts=["pictures.example"]), "https://pictures.example/a.png")


async def test_the_connection_goes_to_the_address_that_was_checked(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second answer of the resolver, which could be another address, is not asked for."""
    real, names = socket.getaddrinfo, []

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(host)
        return real("127.0.0.1" if host == "localhost" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    made = assets(image_hosts=[files.host], image_networks=LOCAL)
    assert await read(made, f"https://{files.host}/good.png?size=1") == PICTURE
    assert names.count("localhost") == 1


async def test_the_certificate_must_be_the_hosts(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolving("127.0.0.1"))
    host = files.host.replace("localhost", "pictures.example")
    with pytest.raises(InvalidRequest, match="could not be fetched: ConnectError"):
        await read(assets(image_hosts=[host], image_networks=LOCAL), f"https://{host}/good.png?size=1")
    assert not files.asked


async def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(HEADER)
    (tmp_path / "pictures2").mkdir()
    (tmp_path / "pictures2/a.png").write_bytes(HEADER)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    os.mkfifo(folder / "pipe.png")
    made = assets(image_folder=folder)
    for location in (
        "../secret.png", str(tmp_path / "secret.png"), f"file://{tmp_path}/secret.png", "link.png", "circle.png",
        f"file://{folder}/%2e%2e/secret.png", "../pictures2/a.png", "folder", "pipe.png", "missing.png", "a\0.png",
        "/dev/zero",
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="is no file below this server's image_folder"):
            await read(made, location)
    with pytest.raises(InvalidRequest, match="names a file of another machine"):
        await read(made, "file://other/a.png")
    with (folder / "large.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_BYTES} bytes"):
        await read(made, "large.png")


async def test_pictures_count_as_bytes_of_the_request(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(bytes(2**17))
    with pytest.raises(OutOfCapacity, match="max_held_body_bytes"):
        await assets(image_folder=tmp_path).fill([("c", {"location": "a.png"})], share(2**16))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Stack, Client]]:
    (folder / "pictures").mkdir()
    (folder / "pictures/a.png").write_bytes(HEADER)
    async with Stack(folder / "state").serving() as stack:
        await stack.restart_gateway(image_folder=folder / "pictures")
        async with Client(base_url=stack.url, timeout=20, headers={"authorization": "Bearer tml-test"}) as client:
            yield stack, client


TEXT = {"type": "encoded_text", "tokens": [1, 2]}


async def test_batches_and_prompts_in_json_take_pointers(tmp_path: Path) -> None:
    pointer = {"type": "image_asset_pointer", "location": "a.png", "format": "png", "expected_tokens": 15}
    missing = {**pointer, "location": "b.png"}
    async with serving(tmp_path) as (stack, client):
        session_id = await client.session()
        model_id = await client.model(session_id)

        def batch(seq_id: int, chunk: dict[str, Any]) -> dict[str, Any]:
            target = {"data": [1] * 17, "dtype": "int64", "shape": [17]}
            datum = {"model_input": {"chunks": [TEXT, chunk]}, "loss_fn_inputs": {"target_tokens": target}}
            held = {"data": [datum], "loss_fn": "cross_entropy"}
            return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": held}

        first = await client.call("forward_backward", batch(1, pointer))
        failed = await client.result(await client.call("forward_backward", batch(2, missing)))
        assert failed["category"] == "user"
        assert "data[0].model_input.chunks[1].location: 'b.png' is no file" in failed["error"]
        assert (await client.call("forward_backward", batch(1, dict(pointer)))) == first  # a repeat
        request = trainer_pb2.ForwardBackwardRequest.FromString(stack.trainer.models[model_id].requests[1])
        image = request.data[0].model_input[1].image
        assert (image.data, image.format, image.expected_tokens) == (HEADER, "png", 15)

        sampler_id = await client.sampling_session(session_id)
        await client.result(
            await client.call("asample", sample_body(sampler_id, 1, prompt={"chunks": [TEXT, pointer]}))
        )
        image = stack.sampler.requests[-1].prompt[1].image
        assert (image.data, image.expected_tokens) == (HEADER, 15)
        failed = await client.result(
            await client.call("asample", sample_body(sampler_id, 2, prompt={"chunks": [missing]}))
        )
        assert "prompt.chunks[0].location: 'b.png' is no file" in failed["error"]
