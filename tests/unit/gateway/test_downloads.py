from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.unit.gateway.stack import FILES, Client, Stack
from tests.unit.gateway.test_checkpoints import ask
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save

MakeUrl = Callable[[Client], Awaitable[str]]


async def external(client: Client, name: str = "x") -> str:
    run_id = await client.model(await client.session())
    body = {"model_id": run_id, "seq_id": 1, "path": name}
    return (await client.result(await client.call("save_weights_external", body)))["path"]


async def fetch(url: str, *, method: str = "GET", **headers: str) -> httpx.Response:
    """As the CLI does it: without a key."""
    async with httpx.AsyncClient(timeout=30) as plain:
        return await plain.request(
            method, url, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )


async def archive_url(client: Client) -> str:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    return (await ask(client, "GET", path, "archive", status=302))["url"]


async def file_url(client: Client) -> str:
    return (await ask(client, "GET", await external(client), "external_weights_urls"))["urls"][
        "adapter_model.safetensors"
    ]


@pytest.mark.gateway(api_keys=["tml-test"])
async def test_signed_addresses_give_the_files_without_a_key(stack: Stack, client: Client) -> None:
    path = await external(client)
    signed = await ask(client, "GET", path, "external_weights_urls")
    assert set(signed["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert 3500 < datetime.fromisoformat(signed["expires"]).timestamp() - time.time() <= 3600
    for name, url in signed["urls"].items():
        assert url.startswith(f"{stack.url}/download/")
        reply = await fetch(url)
        assert reply.status_code == 200
        assert reply.content == FILES[name]
        assert reply.headers["content-length"] == str(len(FILES[name]))
    entries = (await get(client, "audit"))["entries"]
    assert (entries[-1]["event"], entries[-1]["purpose"]) == ("checkpoint_read", "download")


async def test_an_address_that_was_changed_is_refused(stack: Stack, client: Client) -> None:
    urls = (await ask(client, "GET", await external(client), "external_weights_urls"))["urls"]
    url = urls["adapter_config.json"]
    last = "0" if url[-1] != "0" else "1"
    later = str(int(parse_qs(urlsplit(url).query)["expires"][0]) + 1)
    for changed in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("/files/", "/archives/").replace("/adapter_config.json", ""),
        url[:-1] + last,
        url.replace("expires=", "expires=9"),
        url.replace(parse_qs(urlsplit(url).query)["expires"][0], later),
        url.replace("expires=", "expires=x"),
        url.split("?")[0],
    ):
        reply = await fetch(changed)
        assert reply.status_code == 403, changed
        assert "signed" in reply.json()["detail"]


async def test_an_address_expires(stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (await ask(client, "GET", await external(client), "external_weights_urls"))["urls"]["adapter_config.json"]
    now = time.time()
    monkeypatch.setattr("gateway.storage.downloads.time.time", lambda: now + 3601)
    reply = await fetch(url)
    assert reply.status_code == 410
    assert "expired" in reply.json()["detail"]


async def test_files_of_a_deleted_checkpoint_are_gone(client: Client) -> None:
    path = await external(client)
    url = (await ask(client, "GET", path, "external_weights_urls"))["urls"]["adapter_config.json"]
    await ask(client, "DELETE", path)
    reply = await fetch(url)
    assert reply.status_code == 404
    assert path in reply.json()["detail"]


async def test_an_address_is_not_good_for_what_takes_its_place(client: Client) -> None:
    path = await external(client)
    url = (await ask(client, "GET", path, "external_weights_urls"))["urls"]["adapter_config.json"]
    await ask(client, "DELETE", path)
    run_id = path.removeprefix("tinker://").split("/")[0]
    again = {"model_id": run_id, "seq_id": 2, "path": "x"}
    assert (await client.result(await client.call("save_weights_external", again)))["path"] == path
    reply = await fetch(url)
    assert reply.status_code == 410
    assert "replaced" in reply.json()["detail"]


async def test_only_external_weights_have_addresses_of_files(client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    assert "external_weights" in (await ask(client, "GET", path, "external_weights_urls", status=400))["detail"]
    missing = f"tinker://{run_id}/external_weights/none"
    assert missing in (await ask(client, "GET", missing, "external_weights_urls", status=404))["detail"]


async def test_an_archive_holds_the_adapter_and_no_optimizer(client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    signed = await ask(client, "GET", path, "archive", status=302)
    assert datetime.fromisoformat(signed["expires"]).timestamp() > time.time() + 3500
    reply = await fetch(signed["url"])
    assert len(reply.content) == int(reply.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(reply.content)) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert found == {name: content for name, content in FILES.items() if name.startswith("adapter_")}


@pytest.mark.parametrize("make_url", [file_url, archive_url])
async def test_a_part_of_a_download_is_that_part_of_the_whole(client: Client, make_url: MakeUrl) -> None:
    url = await make_url(client)
    whole = await fetch(url)
    size = len(whole.content)
    assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
    asked = {f"{start}-{stop - 1}": (start, stop) for start in range(0, size, 97) for stop in (start + 1, start + 800)}
    asked |= {"0-": (0, size), f"{size - 1}-": (size - 1, size), "-5": (size - 5, size), f"-{size + 9}": (0, size)}
    for text, (start, stop) in asked.items():
        part = await fetch(url, range=f"bytes={text}", if_range=whole.headers["etag"])
        stop = min(stop, size)
        assert part.status_code == 206
        assert part.content == whole.content[start:stop], text
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"


@pytest.mark.parametrize("make_url", [file_url, archive_url])
async def test_head_says_what_get_would_and_reads_nothing(stack: Stack, client: Client, make_url: MakeUrl) -> None:
    url = await make_url(client)
    head, part = await fetch(url, method="HEAD"), await fetch(url, method="HEAD", range="bytes=10-")
    assert stack.trainer.read == []
    whole = await fetch(url)
    names = ("content-length", "content-type", "content-disposition", "etag", "accept-ranges")
    assert [head.headers[name] for name in names] == [whole.headers[name] for name in names]
    assert (head.status_code, head.content) == (200, b"")
    assert (part.status_code, part.headers["content-length"]) == (206, str(len(whole.content) - 10))


async def test_an_invalid_range_gives_all_and_one_beyond_the_end_nothing(client: Client) -> None:
    url = await file_url(client)
    whole = await fetch(url)
    for text in ("bytes=-", "bytes=5-2", "bytes=1-2,5-6", "lines=1-2", "bytes=a-b", "bytes=" + "9" * 30 + "-"):
        reply = await fetch(url, range=text)
        assert (reply.status_code, reply.content) == (200, whole.content), text
    assert (await fetch(url, range="bytes=1-2", if_range='"another"')).status_code == 200
    for text in (f"bytes={len(whole.content)}-", "bytes=-0"):
        reply = await fetch(url, range=text)
        assert (reply.status_code, reply.headers["content-range"]) == (416, f"bytes */{len(whole.content)}")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_damaged_file_is_named_before_the_first_byte(stack: Stack, client: Client, name: str) -> None:
    urls = [await archive_url(client)]
    urls.append((await ask(client, "GET", await external(client), "external_weights_urls"))["urls"][name])
    stack.trainer.damaged = {name}
    for url in urls:
        reply = await fetch(url)
        assert reply.status_code == 500
        assert f"{name} is damaged" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("settings", "headers", "base"),
    [
        ({}, {"host": "tinker.test:81"}, "http://tinker.test:81/download/"),
        ({}, {"x-forwarded-host": "evil.test", "x-forwarded-proto": "https"}, "{own}/download/"),
        ({"public_url": "https://a.test/tinker/"}, {"host": "b.test"}, "https://a.test/tinker/download/"),
    ],
)
async def test_an_address_begins_as_its_reader_can_reach_the_server(
    stack: Stack, client: Client, settings: dict[str, Any], headers: dict[str, str], base: str
) -> None:
    await stack.restart_gateway(api_keys=["tml-test"], **settings)
    run_id, name = (await external(client)).removeprefix("tinker://").split("/", 1)
    url = f"/api/v1/training_runs/{run_id}/checkpoints/{name}/external_weights_urls"
    urls = (await client.get(url, headers=headers)).json()["urls"]
    assert all(url.startswith(base.format(own=stack.url)) for url in urls.values())


async def test_gateways_behind_one_database_accept_each_others_addresses(stack: Stack, client: Client) -> None:
    url = (await ask(client, "GET", await external(client), "external_weights_urls"))["urls"]["adapter_config.json"]
    await stack.restart_gateway()
    assert (await fetch(url)).status_code == 200
    await stack.restart_gateway(download_secret="another")
    assert (await fetch(url)).status_code == 403
    assert (stack.state_dir / "gateway.db").stat().st_mode & 0o077 == 0


async def test_a_download_whose_trainer_is_away_is_answered_at_once(stack: Stack, client: Client) -> None:
    url = (await ask(client, "GET", await external(client), "external_weights_urls"))["urls"]["adapter_config.json"]
    await stack.trainer_backend.stop()
    async with asyncio.timeout(30):
        assert (await fetch(url)).status_code == 503
