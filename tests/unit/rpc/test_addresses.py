"""The addresses of services, in a file and behind names, and what the services make of them at their start."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from tests.support.certificates import make
from tests.support.waiting import until
from tinsmith.rpc.addresses import Addresses, AddressSource, read_addresses, write_addresses
from trainer_service.config import TrainerConfig

SOME = Addresses(("10.0.0.1:8001",), ("10.0.0.2:8002", "[fd00::3]:8002"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_addresses(tmp_path / "new" / "services.json", SOME)
    assert read_addresses(tmp_path / "new" / "services.json") == SOME
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["services.json"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"gateways": []}', "is not a JSON object"),
        ('{"samplers": "10.0.0.2:8002"}', "samplers in .* is not a list"),
        ('{"samplers": [7]}', "samplers in .* is not a list"),
        ('{"samplers": ["10.0.0.2"]}', "'10.0.0.2' in .* is not of the form HOST:PORT"),
        ('{"trainers": ["a:1", "a:1"]}', "trainers in .* contains a duplicate"),
        ('{"samplers": ["dns:///sampler"]}', "'dns:///sampler' in .* is not of the form HOST:PORT"),
        (
            '{"trainers": ["dns:///trainer:8001"]}',
            "'dns:///trainer:8001' in .* each trainer needs an address of its own",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_by_every_service(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "services.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_addresses(path)
    with pytest.raises(ValueError, match=complaint):
        GatewayConfig(services_file=path)
    with pytest.raises(ValueError, match=complaint):
        TrainerConfig(base_model="/m", services_file=path)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"samplers": ["a:1", "a:1"]}, "samplers in the settings contains a duplicate"),
        ({"samplers": ["a"]}, "samplers: 'a' in the settings is not of the form HOST:PORT"),
        ({"samplers": ["dns:///a"]}, "samplers: 'dns:///a' in the settings is not of the form HOST:PORT"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused_at_the_start(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        GatewayConfig(**settings)
    with pytest.raises(ValueError, match=complaint):
        TrainerConfig(base_model="/m", **settings)


def test_a_trainer_has_an_address_of_its_own() -> None:
    with pytest.raises(ValueError, match="trainers: 'dns:///t:1' in the settings: each trainer needs an address"):
        GatewayConfig(trainers=["dns:///t:1"])


def test_certificates_need_hosts(tmp_path: Path) -> None:
    files = make(tmp_path).certificates("trainer")
    grpc: dict[str, Any] = {"grpc_ca": files.ca, "grpc_cert": files.cert, "grpc_key": files.key}
    with pytest.raises(ValueError, match="samplers: 'dns:///s:1' stands for addresses that no certificate names"):
        GatewayConfig(samplers=["dns:///s:1"], **grpc)
    with pytest.raises(ValueError, match="samplers: 'dns:///s:1' stands for addresses that no certificate names"):
        TrainerConfig(base_model="/m", samplers=["dns:///s:1"], **grpc)


def test_addresses_are_given_once(tmp_path: Path) -> None:
    path = tmp_path / "services.json"
    write_addresses(path, SOME)
    assert GatewayConfig(services_file=path).services.known == SOME
    assert TrainerConfig(base_model="/m", services_file=path).services.known.samplers == SOME.samplers
    with pytest.raises(ValueError, match="trainers and services_file exclude each other"):
        GatewayConfig(services_file=path, trainers=["127.0.0.1:1"])
    with pytest.raises(ValueError, match="samplers and services_file exclude each other"):
        TrainerConfig(base_model="/m", services_file=path, samplers=["127.0.0.1:1"])


@asynccontextmanager
async def changes(source: AddressSource) -> AsyncIterator[list[Addresses]]:
    """The changes that the source yields meanwhile."""
    found: list[Addresses] = []

    async def follow() -> None:
        async for addresses in source.changes():
            found.append(addresses)

    following = asyncio.create_task(follow())
    yield found
    following.cancel()


async def test_a_change_is_noticed_and_a_broken_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tinsmith.rpc.addresses._FILE_INTERVAL_S", 0.01)
    path = tmp_path / "services.json"
    write_addresses(path, SOME)
    source = AddressSource(Addresses(), path)
    async with changes(source) as found:
        path.write_text("{")
        await until(lambda: "cannot be read" in caplog.text)
        path.unlink()
        await until(lambda: "No such file" in caplog.text)
        write_addresses(path, SOME)
        write_addresses(path, Addresses(SOME.trainers))
        await until(lambda: len(found) == 1)
        write_addresses(path, Addresses())
        await until(lambda: len(found) == 2)
    assert found == [Addresses(SOME.trainers, ()), Addresses((), ())]
    assert source.known == Addresses((), ())


async def test_addresses_that_cannot_change_are_not_followed() -> None:
    source = AddressSource(SOME)
    assert not source.may_change
    assert source.known == SOME
    assert [found async for found in source.changes()] == []


class Names:
    """Stands in for the resolver of the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tinsmith.rpc.addresses._NAMES_INTERVAL_S", 0.01)
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)
        self.addresses: dict[str, list[str]] = {}
        self.num_asked = 0

    def _getaddrinfo(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        self.num_asked += 1
        if host not in self.addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in self.addresses[host]]


async def test_a_name_stands_for_all_addresses_of_its_host_as_they_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(monkeypatch)
    names.addresses["one"] = ["10.0.0.3", "10.0.0.2", "10.0.0.3"]
    listed = Addresses(("t:8001",), ("dns:///one:8002", "fixed:8002", "dns:///two:8002"))
    source = AddressSource(listed)
    assert source.may_change
    assert source.known == Addresses(("t:8001",), ("fixed:8002",))
    async with changes(source) as found:
        await until(lambda: len(found) == 1)
        assert found[0].samplers == ("10.0.0.2:8002", "10.0.0.3:8002", "fixed:8002")
        await until(lambda: "dns:///two:8002 is not found" in caplog.text)
        names.addresses["two"] = ["fd00::1", "10.0.0.2"]
        await until(lambda: len(found) == 2)
        assert found[1].samplers == ("10.0.0.2:8002", "10.0.0.3:8002", "fixed:8002", "[fd00::1]:8002")
        del names.addresses["one"]  # an outage of the resolver
        await until(lambda: "dns:///one:8002 is not found" in caplog.text)
        names.addresses["two"] = ["10.0.0.9", "10.0.0.2"]
        await until(lambda: len(found) == 3)
        assert found[2].samplers == ("10.0.0.2:8002", "10.0.0.3:8002", "fixed:8002", "10.0.0.9:8002")
        names.addresses["two"].reverse()  # another order is no change
        asked = names.num_asked
        await until(lambda: names.num_asked > asked + 4)
        assert len(found) == 3
    assert caplog.text.count("dns:///two:8002 is not found") == 1


async def test_the_system_resolves_names() -> None:
    source = AddressSource(Addresses(samplers=["dns:///localhost:8002"]))
    async with changes(source) as found:
        await until(lambda: bool(found))
    assert "127.0.0.1:8002" in found[0].samplers
