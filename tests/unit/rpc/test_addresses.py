"""The file with the addresses of services, and what the services make of it at their start."""

import asyncio
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from tests.support.waiting import until
from tinsmith.rpc.addresses import Addresses, address_changes, read_addresses, write_addresses
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
    ],
)
def test_a_file_that_is_none_is_refused_by_every_service(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "services.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"services_file: .*{complaint}|services_file: {complaint}"):
        read_addresses(path)
    with pytest.raises(ValueError, match=complaint):
        GatewayConfig(services_file=path)
    with pytest.raises(ValueError, match=complaint):
        TrainerConfig(base_model="/m", services_file=path)


def test_addresses_are_given_once(tmp_path: Path) -> None:
    path = tmp_path / "services.json"
    write_addresses(path, SOME)
    assert GatewayConfig(services_file=path).services == SOME
    assert TrainerConfig(base_model="/m", services_file=path).services.samplers == SOME.samplers
    with pytest.raises(ValueError, match="trainers and services_file exclude each other"):
        GatewayConfig(services_file=path, trainers=["127.0.0.1:1"])
    with pytest.raises(ValueError, match="samplers and services_file exclude each other"):
        TrainerConfig(base_model="/m", services_file=path, samplers=["127.0.0.1:1"])


async def test_a_change_is_noticed_and_a_broken_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tinsmith.rpc.addresses._INTERVAL_S", 0.01)
    path = tmp_path / "services.json"
    write_addresses(path, SOME)
    found: list[Addresses] = []

    async def follow() -> None:
        async for addresses in address_changes(path, SOME):
            found.append(addresses)

    following = asyncio.create_task(follow())
    path.write_text("{")
    await until(lambda: "cannot be read" in caplog.text)
    path.unlink()
    await until(lambda: "No such file" in caplog.text)
    write_addresses(path, SOME)
    write_addresses(path, Addresses(SOME.trainers))
    await until(lambda: len(found) == 1)
    assert found == [Addresses(SOME.trainers, ())]
    following.cancel()
