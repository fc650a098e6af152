from __future__ import annotations

import asyncio
import io
import tarfile
import time
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.unit.gateway.stack import FILES, Client, Stack
from tests.unit.gateway.test_checkpoints import ask
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save


async def external(client: Client, name: str = "x") -> str:
    run_id = await client.model(await client.session())
    body = {"model_id": run_id, "seq_id": 1, "path": name}
    return (await client.result(await client.call("save_weights_external", body)))["path"]


async def fetch(url: str, *, method: str = "GET") -> httpx.Response:
    """As the CLI does it: without any header of ours."""
    async with httpx.AsyncClient(timeout=30) as plain:
        return await plain.request(method, url)


async def test_signed_addresses_give_the_files_without_a_key(stack: Stack, client: Client) -> None:
    await stack.restart_gateway(api_keys=["tml-test"])
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
        assert (await fetch(url, method="HEAD")).status_code == 405
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
    monkeypatch.setattr("gateway.downloads.time.time", lambda: now + 3601)
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
    await stack.restart_gateway(**settings)
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
