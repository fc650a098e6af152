"""Machines join the first one: what it admits, what it refuses and how it says so, and what all hear of each other."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import tinsmith
from tests.support.waiting import until
from tinsmith.rpc.addresses import Addresses, read_addresses
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.server import Server
from tinsmith.rpc.tls import Certificates
from tinsmith_cli.base_models import ServedModel, UsageError
from tinsmith_cli.cluster.joining import Admission, ClusterClient
from tinsmith_cli.cluster.registrar import Registrar
from tinsmith_cli.cluster.token import Token
from tinsmith_cli.cluster.weights import weights_digest
from tinsmith_cli.ports import free_ports

Make = Callable[..., ClusterClient]


def make_model(folder: Path, *, seed: int = 0, shards: int = 1) -> ServedModel:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    values = np.random.default_rng(seed).standard_normal((4, 400), np.float32)
    tensors = {f"layer.{n}": values[n] for n in range(4)}
    for shard in range(shards):
        part = {name: tensor for name, tensor in tensors.items() if int(name[-1]) % shards == shard}
        save_file(part, folder / f"model-{shard}.safetensors")
    return ServedModel(str(folder), ("m", "other-name"))


class First:
    """The first machine, without services."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.reports: list[str] = []
        self.settings = {
            "address": f"127.0.0.1:{free_ports(1)[0]}",
            "models": [make_model(folder / "model")],
            "settings": {"dtype": "float32", "max-lora-rank": "8", "full-training": "True"},
            "certificates": None,
            **settings,
        }
        self.registrar = self.make()

    def make(self) -> Registrar:
        return Registrar(self.folder / "cluster", report=self.reports.append, **self.settings)  # type: ignore[arg-type]

    @property
    def services(self) -> Addresses:
        return read_addresses(self.folder / "cluster/services.json")


@pytest.fixture
async def first(tmp_path: Path) -> AsyncIterator[First]:
    first = First(tmp_path / "first")
    async with first.registrar.serving():
        yield first


@pytest.fixture
def further(first: First, tmp_path: Path) -> Make:
    def make(name: str = "a", token: Token | None = None) -> ClusterClient:
        return ClusterClient(token or first.registrar.token, tmp_path / name, report=first.reports.append)

    return make


async def join(joined: ClusterClient, *roles: str, **settings: Any) -> Admission:
    """The connection for the certificate blocks, so the caller makes it on a thread."""
    request = {"models": [], "settings": {}, "trainer_nodes": 1, "ranks_port": 8301, "replace": False, **settings}
    return await joined.join(roles=roles or ["sampler"], host="127.0.0.1", **request)


def modes_of_secrets(folder: Path) -> list[int]:
    found = [path for name in ("*-key.pem", "join-token", "service-key") for path in folder.rglob(name)]
    return [stat.S_IMODE(path.stat().st_mode) for path in found]


async def test_a_machine_that_joins_gets_models_settings_and_a_certificate_that_the_others_trust(
    first: First, further: Make, tmp_path: Path
) -> None:
    joined = await asyncio.to_thread(further)
    admission = await join(joined, "trainer")
    assert admission.models == [ServedModel(str(first.folder / "model"), ("m", "other-name"))]
    assert admission.settings == first.settings["settings"]
    assert [(node.rank, node.master_host, node.master_port) for node in admission.nodes] == [(0, "127.0.0.1", 8301)]
    assert joined.local_host == "127.0.0.1"
    folder = first.registrar.authority
    theirs = Certificates(*(joined.certificates / f"{name}.pem" for name in ("ca", "trainer", "trainer-key")))
    ours = Certificates(*(folder / f"{name}.pem" for name in ("ca", "gateway", "gateway-key")))
    for serving, calling in ((theirs, ours), (ours, theirs)):
        server = Server("127.0.0.1:0", [], api_keys=["k"], certificates=serving)
        await server.start()
        await server.set_serving(True)
        async with connect(f"127.0.0.1:{server.port}", certificates=calling) as channel:
            assert await is_serving(channel)
        await server.stop(0)
    modes = modes_of_secrets(tmp_path)
    assert (len(modes), set(modes)) == (11, {0o600})
    assert first.reports == ["127.0.0.1 joins as trainer"]


async def test_services_of_all_are_listed_for_all_and_stay_until_they_leave(first: First, further: Make) -> None:
    trains, samples = await asyncio.to_thread(further, "a"), await asyncio.to_thread(further, "b")
    await join(trains, "trainer")
    await join(samples, "sampler")
    following = asyncio.create_task(trains.follow(trainers=["h1:8101"], samplers=[]))
    await until(lambda: read_addresses(trains.services_file).trainers == ("h1:8101",))
    other = asyncio.create_task(samples.follow(trainers=[], samplers=["h2:8201", "h2:8202"]))
    everything = Addresses(("h1:8101",), ("h2:8201", "h2:8202"))
    for path in (trains.services_file, samples.services_file, first.folder / "cluster/services.json"):
        await until(lambda path=path: read_addresses(path) == everything)
    first.registrar.list_own(trainers=[], samplers=["h0:8201"])
    assert first.services.samplers == ("h2:8201", "h2:8202", "h0:8201")

    other.cancel()  # its machine is lost: it may come back
    await asyncio.wait([other])
    everyone = first.services
    (first.folder / "cluster/services.json").unlink()
    first.make()
    assert first.services == everyone, "a first machine that is restarted knows all"
    await samples.leave(gives_up_trainers=False)
    await until(lambda: read_addresses(trains.services_file) == Addresses(("h1:8101",), ("h0:8201",)))
    following.cancel()
    await trains.leave(gives_up_trainers=False)  # its runs live there: the gateway waits for it
    assert first.services.trainers == ("h1:8101",)
    await trains.leave(gives_up_trainers=True)  # it never served
    assert first.services.trainers == ()


async def test_a_first_machine_that_is_restarted_is_followed_again(tmp_path: Path) -> None:
    first = First(tmp_path / "first")
    token = first.registrar.token
    async with first.registrar.serving():
        joined = await asyncio.to_thread(ClusterClient, token, tmp_path / "a", report=first.reports.append)
        await join(joined)
        following = asyncio.create_task(joined.follow(trainers=[], samplers=["h2:8201"]))
        await until(lambda: first.services.samplers == ("h2:8201",))
    await until(lambda: first.reports[-1].endswith("this machine goes on"))
    again = first.make()
    assert again.token == token
    async with again.serving():
        again.list_own(trainers=["h0:8101"], samplers=[])
        await until(lambda: read_addresses(joined.services_file) == Addresses(("h0:8101",), ("h2:8201",)))
        assert first.reports[-1].endswith("can be reached again")
        following.cancel()
        await asyncio.wait([following])


async def test_a_token_with_another_key_is_refused(first: First, further: Make) -> None:
    token = Token(first.registrar.token.address, first.registrar.token.fingerprint, "another-key-of-somebody")
    joined = await asyncio.to_thread(further, token=token)
    with pytest.raises(UsageError, match=r"--join: .* does not know this token's key") as refused:
        await join(joined)
    assert "another-key" not in str(refused.value)


async def test_another_machine_than_the_tokens_is_refused_before_it_hears_the_key(first: First, further: Make) -> None:
    token = Token(first.registrar.token.address, "0" * 64, first.registrar.token.service_key)
    with pytest.raises(UsageError, match=r"--join: .* shows another certificate than the token's"):
        await asyncio.to_thread(further, token=token)


async def test_an_address_that_nobody_listens_at_is_told(first: First, further: Make) -> None:
    token = Token(f"127.0.0.1:{free_ports(1)[0]}", first.registrar.token.fingerprint, "k" * 20)
    with pytest.raises(UsageError, match=r"--join: the first machine cannot be reached at .*:\d+ \(.*refused"):
        await asyncio.to_thread(further, token=token)


async def test_a_first_machine_that_falls_silent_is_told(
    first: First, further: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = await asyncio.to_thread(further)
    monkeypatch.setattr("tinsmith_cli.cluster.joining._JOIN_S", 0.5)
    monkeypatch.setattr(first.registrar, "_signed", lambda request: time.sleep(2))  # on a thread
    with pytest.raises(UsageError, match=r"--join: the first machine, .* has not answered within 0\.5 s; try again"):
        await join(joined)


async def test_another_version_is_refused(first: First, further: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = await asyncio.to_thread(further)
    monkeypatch.setattr("tinsmith_cli.cluster.joining.tinsmith", SimpleNamespace(__version__="0.0.1"))
    expected = f"this machine has Tinsmith 0.0.1, and the first machine, 127.0.0.1, has {tinsmith.__version__}: install"
    with pytest.raises(UsageError, match=re.escape(expected)):
        await join(joined)


async def test_base_models_that_are_not_the_first_machines_are_refused(
    first: First, further: Make, tmp_path: Path
) -> None:
    joined = await asyncio.to_thread(further)
    foreign = ServedModel("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B",))
    with pytest.raises(UsageError, match=r"--base-model: 'Qwen/Qwen3-8B' is not served .* which serves m, other-name"):
        await join(joined, models=[foreign])
    with pytest.raises(UsageError, match="here has other weights than m on the first machine"):
        await join(joined, models=[make_model(tmp_path / "changed", seed=1)])
    same = make_model(tmp_path / "same", shards=2)
    assert (await join(joined, models=[same])).models == [ServedModel(same.source, ("m", "other-name"))]


async def test_a_folder_that_this_machine_lacks_or_has_otherwise_is_told_and_the_trainers_place_is_free_again(
    first: First, further: Make
) -> None:
    joined = await asyncio.to_thread(further)
    model = first.folder / "model"
    model.rename(first.folder / "moved")
    with pytest.raises(UsageError, match=r"which is no folder of a model here; .* --base-model m=PATH"):
        await join(joined, "trainer")
    make_model(model, seed=2)
    with pytest.raises(UsageError, match="here has other weights than m on the first machine"):
        await join(joined, "trainer")
    assert json.loads((first.folder / "cluster/members.json").read_text())["trainers"] == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "bfloat16"}, "--dtype: bfloat16 here, and float32 on the first machine"),
        ({"quantize": "int8"}, "--quantize: int8 here, and not set on the first machine"),
    ],
)
async def test_settings_that_must_be_alike_are_compared(
    first: First, further: Make, given: dict[str, str], message: str
) -> None:
    joined = await asyncio.to_thread(further)
    with pytest.raises(UsageError, match=message):
        await join(joined, settings=given)
    await join(joined, settings={"dtype": "float32"})


async def test_a_base_model_may_have_several_trainers_each_with_its_place(first: First, further: Make) -> None:
    one, two, three = [await asyncio.to_thread(further, name) for name in "abc"]
    for machine in (one, two):
        admission = await join(machine, "trainer")
        assert [node.rank for node in admission.nodes] == [0]
    await join(one, "trainer")  # restarted
    assert len(json.loads((first.folder / "cluster/members.json").read_text())["trainers"]) == 2
    following = [
        asyncio.create_task(machine.follow(trainers=[f"h{n}:8101"], samplers=[]))
        for n, machine in enumerate((one, two), start=1)
    ]
    await until(lambda: sorted(first.services.trainers) == ["h1:8101", "h2:8101"])
    with pytest.raises(UsageError, match=r"--replace: m has several trainers, on 127\.0\.0\.1; 127\.0\.0\.1"):
        await join(three, "trainer", replace=True)
    for task in following:
        task.cancel()


async def test_a_trainer_that_is_gone_for_good_can_be_replaced(first: First, further: Make) -> None:
    one, two = await asyncio.to_thread(further, "a"), await asyncio.to_thread(further, "b")
    await join(one, "trainer")
    following = asyncio.create_task(one.follow(trainers=["h1:8101"], samplers=["h1:8201"]))
    await until(lambda: first.services.trainers)
    await join(one, "trainer")  # restarted
    await join(two, "trainer", replace=True)
    assert first.services == Addresses((), ("h1:8201",))
    following.cancel()
    late = asyncio.create_task(one.follow(trainers=["h1:8101"], samplers=[]))
    await until(lambda: any("another machine has taken this one's place" in line for line in first.reports))
    assert first.services.trainers == ()
    late.cancel()


async def test_a_trainer_of_two_machines_has_two_places(first: First, further: Make) -> None:
    machines = [await asyncio.to_thread(further, name) for name in "abc"]
    nodes = [
        (await join(one, "trainer", trainer_nodes=2, ranks_port=9000 + n)).nodes for n, one in enumerate(machines[:2])
    ]
    assert [(node.rank, node.master_port) for (node,) in nodes] == [(0, 9000), (1, 9000)]
    again = await join(machines[1], "trainer", trainer_nodes=2)
    assert [node.rank for node in again.nodes] == [1]
    await machines[0].leave(gives_up_trainers=True)
    with pytest.raises(UsageError, match="--trainer-nodes: 3 here, and 2 on the first machine of the trainer of m"):
        await join(machines[2], "trainer", trainer_nodes=3)
    assert [node.rank for node in (await join(machines[2], "trainer", trainer_nodes=2)).nodes] == [0]


async def test_the_gateway_is_for_the_first_machine(first: First, further: Make) -> None:
    joined = await asyncio.to_thread(further)
    with pytest.raises(UsageError, match="--role: gateway is not for a machine that joins"):
        await join(joined, "gateway")


def test_an_authority_of_ones_own_needs_its_key(tmp_path: Path) -> None:
    (tmp_path / "certificates").mkdir()
    with pytest.raises(UsageError, match=r"--certificates: .* has no ca-key\.pem"):
        First(tmp_path / "first", certificates=tmp_path / "certificates")


def test_a_file_of_members_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first/cluster").mkdir(parents=True)
    (tmp_path / "first/cluster/members.json").write_text("{}")
    with pytest.raises(UsageError, match=r"members\.json cannot be used"):
        First(tmp_path / "first")


@pytest.mark.parametrize("text", ["10.0.0.1:8100", "10.0.0.1/" + "0" * 64 + "/" + "k" * 20, "a:1/00/" + "k" * 20, ""])
def test_a_token_that_is_not_whole_is_refused_without_its_key(text: str) -> None:
    with pytest.raises(UsageError, match=r"--join: .* is not a whole token") as refused:
        Token.parse(text)
    assert "kkkk" not in str(refused.value)


def test_a_token_is_what_its_text_says() -> None:
    token = Token("[fd00::1]:8100", "ab" * 32, "secret-secret-secret")
    assert Token.parse(f" {token.text}\n") == token
    assert "secret-secret" not in repr(token)


def test_a_digest_of_weights_knows_values_types_and_names_and_not_files(tmp_path: Path) -> None:
    one = weights_digest(make_model(tmp_path / "a").source)
    assert weights_digest(make_model(tmp_path / "b", shards=3).source) == one
    assert weights_digest(make_model(tmp_path / "c", seed=1).source) != one
    half = tmp_path / "half"
    half.mkdir()
    save_file({f"layer.{n}": np.zeros(400, np.float16) for n in range(4)}, half / "model.safetensors")
    assert weights_digest(str(half)) not in ("", one)
    assert weights_digest("Qwen/Qwen3-8B") == weights_digest(str(tmp_path)) == ""
