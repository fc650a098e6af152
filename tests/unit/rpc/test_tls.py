"""Mutual TLS of gRPC with real certificates: who gets through, who does not, and what the settings refuse."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from pydantic import ValidationError

from gateway.config import GatewayConfig
from sampler_service.config import SamplerConfig
from tests.support.certificates import Made, make
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.server import Server
from tinsmith.rpc.tls import Certificates, GrpcTls
from tinsmith_cli import main
from tinsmith_cli.make_certificates import make_certificates
from trainer_service.config import TrainerConfig

HEALTHCHECK = Path(__file__).parents[3] / "docker" / "healthcheck.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("certificates"))


async def serve(certificates: Certificates | None) -> Server:
    server = Server("127.0.0.1:0", [], certificates=certificates)
    await server.start()
    await server.set_serving(True)
    return server


@pytest.fixture
async def port(made: Made) -> AsyncIterator[int]:
    server = await serve(made.certificates("trainer"))
    yield server.port
    await server.stop(0)


async def reaches(address: str, certificates: Certificates | None) -> bool:
    async with connect(address, certificates=certificates) as channel:
        return await is_serving(channel, timeout_s=1.5)


@pytest.mark.parametrize("name", ["gateway", "sampler", "client"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_holders_of_a_certificate_reach_each_other(made: Made, port: int, host: str, name: str) -> None:
    assert await reaches(f"{host}:{port}", made.certificates(name))


async def test_a_client_without_a_certificate_is_refused(made: Made, port: int) -> None:
    credentials = grpc.ssl_channel_credentials((made.good / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        assert not await is_serving(channel, timeout_s=1.5)


async def test_a_client_without_tls_is_refused(port: int) -> None:
    assert not await reaches(f"127.0.0.1:{port}", None)


async def test_a_certificate_of_another_authority_is_refused(made: Made, port: int) -> None:
    assert not await reaches(f"127.0.0.1:{port}", made.certificates("gateway", made.foreign))


async def test_an_expired_client_certificate_is_refused(made: Made, port: int) -> None:
    assert not await reaches(f"127.0.0.1:{port}", made.certificates("gateway", made.expired))


@pytest.mark.parametrize("which", ["expired", "foreign", "a client's", "none"])
async def test_a_server_that_cannot_prove_itself_is_refused(made: Made, which: str) -> None:
    """Before a key is sent to it."""
    certificates = {
        "expired": made.certificates("trainer", made.expired),
        "foreign": made.certificates("trainer", made.foreign),
        "a client's": made.certificates("client"),
        "none": None,
    }[which]
    server = await serve(certificates)
    try:
        assert not await reaches(f"127.0.0.1:{server.port}", made.certificates("gateway"))
    finally:
        await server.stop(0)


async def test_a_server_of_another_name_is_refused(made: Made, tmp_path: Path) -> None:
    for name in ("ca.pem", "ca-key.pem"):
        shutil.copy(made.good / name, tmp_path)
    narrow = tmp_path / "narrow"
    shutil.copytree(tmp_path, narrow)
    make_certificates(narrow, hosts=["other.example"])
    cert = x509.load_pem_x509_certificate((narrow / "sampler.pem").read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"sampler", "localhost", "other.example"} <= set(names.get_values_for_type(x509.DNSName))
    server = await serve(made.certificates("sampler", narrow))
    try:
        credentials = made.certificates("gateway").client()
        for target, expected in (("other.example", True), ("trainer", False)):
            options = [("grpc.ssl_target_name_override", target)]
            async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, options=options) as channel:
                assert await is_serving(channel, timeout_s=1.5) is expected, target
    finally:
        await server.stop(0)


async def test_the_containers_health_check_shows_its_service_certificate(
    made: Made, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> int:
        script = [sys.executable, str(HEALTHCHECK), "trainer", f"127.0.0.1:{port}"]
        return await (await asyncio.create_subprocess_exec(*script, stderr=asyncio.subprocess.DEVNULL)).wait()

    assert await check() == 1
    for name, value in made.env("TRAINER", "trainer").items():
        monkeypatch.setenv(name, value)
    assert await check() == 0


@pytest.mark.parametrize("cls", [GatewayConfig, TrainerConfig, SamplerConfig])
def test_settings_take_all_three_files_or_none_and_only_such_as_can_be_used(cls: type[GrpcTls], made: Made) -> None:
    needed = {} if cls is GatewayConfig else {"base_model": "m"}
    files = made.certificates("trainer")
    good = {"grpc_ca": files.ca, "grpc_cert": files.cert, "grpc_key": files.key}
    assert cls(**needed, **good).certificates == files
    assert cls(**needed).certificates is None
    for name in good:
        with pytest.raises(ValidationError, match="belong together"):
            cls(**needed, **{other: path for other, path in good.items() if other != name})
    other_key = made.good / "sampler-key.pem"
    for wrong, message in (
        ({"grpc_key": other_key}, "are not a certificate and its key"),
        ({"grpc_cert": Path("/nowhere")}, "are not a certificate and its key"),
        ({"grpc_ca": other_key}, "holds no certificate"),
    ):
        with pytest.raises(ValidationError, match=message):
            cls(**needed, **{**good, **wrong})


async def test_an_address_for_other_machines_without_tls_is_told_in_the_log(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [Server("127.0.0.1:0", []), Server("0.0.0.0:0", [], certificates=made.certificates("trainer"))]
    assert "clear" not in caplog.text
    servers.append(Server("0.0.0.0:0", []))
    for server in servers:
        await server.stop(0)
    assert "gRPC at 0.0.0.0:0 is not encrypted: keys and data go in clear; set grpc_ca" in caplog.text


def test_a_second_run_renews_under_the_same_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    assert main(["make-certificates", str(folder)]) == 0
    assert "made ca, gateway, trainer, sampler, client" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["make-certificates", str(folder), "--host", "10.0.0.7", "--days", "30"]) == 0
    assert "made gateway, trainer, sampler, client" in capsys.readouterr().out
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"ca.pem", "ca-key.pem"}
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*-key.pem")} == {0o600}
    lifetime = x509.load_pem_x509_certificate(after["trainer.pem"])
    assert (lifetime.not_valid_after_utc - lifetime.not_valid_before_utc).days == 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--days", "0"], "--days: 0 is not at least 1"),
        (["--host", "ä.example"], "--host: 'ä.example' is neither"),
    ],
)
def test_what_cannot_be_made_is_refused(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make-certificates", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_authority_that_is_none_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.pem").write_text("not a certificate")
    (tmp_path / "ca-key.pem").write_text("not a key")
    assert main(["make-certificates", str(tmp_path)]) == 2
    assert "are not an authority of this command" in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_text() == "not a certificate"
