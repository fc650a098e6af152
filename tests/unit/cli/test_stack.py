import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.planning.plan_rows import planned
from tinsmith.cores import Cores, usable_cores
from tinsmith.rpc.server import Server
from tinsmith_cli.base_models import ServedModel
from tinsmith_cli.readiness import wait_gateway, wait_grpc
from tinsmith_cli.settings import Settings
from tinsmith_cli.stack import Node, ServiceKeys, Site, Stack, Threads, Tls, divide_cores
from tinsmith_cli.supervisor import Service


def make_stack(models: list[ServedModel], *, keys: ServiceKeys | None = None, **settings: Any) -> Stack:
    return Stack(Settings(**{"state_dir": Path("/state"), "checkpoint_dir": "", **settings}), models, keys)


def changed(stack: Stack, **settings: Any) -> Stack:
    return replace(stack, settings=replace(stack.settings, **settings))


def flag(service: Service, name: str) -> str:
    return service.argv[service.argv.index(f"--{name}") + 1]


@pytest.mark.parametrize(
    ("cores", "groups", "samplers", "expected"),
    [
        (1, 1, 1, (1, 1)),
        (2, 1, 1, (1, 1)),
        (9, 1, 1, (4, 5)),
        (16, 2, 1, (4, 4)),
        (2, 3, 1, (1, 1)),
        (16, 1, 4, (8, 2)),
        (16, 2, 3, (4, 1)),
        (2, 1, 2, (1, 1)),
    ],
)
def test_trainers_and_samplers_share_no_core_where_there_are_enough(
    cores: int, groups: int, samplers: int, expected: tuple[int, int]
) -> None:
    threads = divide_cores(cores, groups=groups, samplers=samplers, most=Threads(0, 0))
    assert threads == Threads(*expected)


def test_a_share_is_no_larger_than_what_a_service_may_use() -> None:
    assert divide_cores(8, groups=1, samplers=2, most=Threads(6, 1)) == Threads(4, 1)
    assert divide_cores(8, groups=1, samplers=1, most=Threads(3, 0)) == Threads(3, 4)


def test_services_share_a_page_of_cores_and_explicit_threads_are_the_most(tmp_path: Path) -> None:
    models = [ServedModel("/m/a", ("a",)), ServedModel("/m/b", ("b",))]
    stack = make_stack(models, state_dir=tmp_path, samplers=2, sampler_threads=3)
    *services, gateway = stack.services(stack.groups())
    assert [flag(service, "cores-page") for service in (*services, gateway)] == [
        f"{tmp_path}/cores:{place}" for place in (0, 3, 1, 2, 4, 5, 6)
    ]
    assert "--num-threads" not in services[0].argv
    assert flag(services[2], "num-threads") == "3"
    stack.make_cores_page()
    places = [Cores(flag(service, "cores-page"), most=0, set_threads=lambda _: None) for service in services]
    shares = divide_cores(usable_cores(), groups=2, samplers=2, most=stack.most_threads)
    assert [place.share for place in places] == [shares.trainer] * 2 + [shares.sampler] * 4
    assert Cores(flag(gateway, "cores-page"), most=1, set_threads=lambda _: None).threads == 1


def test_the_form_of_logs_and_tracing_are_the_same_for_all() -> None:
    stack = make_stack([ServedModel("/m/a", ("a",))])
    for service in stack.services(stack.groups()):
        for name in ("log-format", "log-level", "tracing"):
            assert f"--{name}" not in service.argv  # then TRAINER_TRACING and its like may say it
    stack = changed(stack, log_format="text", tracing=True)
    for service in stack.services(stack.groups()):
        assert (flag(service, "log-format"), flag(service, "tracing")) == ("text", "true")


@pytest.mark.parametrize(("given", "used"), [("", "/state/checkpoints"), ("s3://bucket/x", "s3://bucket/x")])
def test_all_trainers_keep_their_checkpoints_in_one_place(given: str, used: str) -> None:
    stack = changed(make_stack([ServedModel("/m/a", ("a",)), ServedModel("/m/b", ("b",))]), checkpoint_dir=given)
    trainers = [service for service in stack.services(stack.groups()) if service.name.startswith("trainer")]
    assert [flag(service, "checkpoint-dir") for service in trainers] == [used, used]


def test_each_trainer_knows_its_own_sampler_and_the_gateway_knows_all() -> None:
    stack = make_stack([ServedModel("/m/a", ("a", "b")), ServedModel("org/c", ("org/c",))])
    services = {service.name: service for service in stack.services(stack.groups())}
    assert list(services) == ["trainer-1", "trainer-2", "sampler-1", "sampler-2", "gateway"]
    for number in "12":
        assert json.loads(flag(services[f"trainer-{number}"], "samplers")) == [
            flag(services[f"sampler-{number}"], "listen")
        ]
    assert json.loads(flag(services["trainer-1"], "model-names")) == ["a", "b"]
    assert json.loads(flag(services["gateway"], "trainers")) == [
        flag(services["trainer-1"], "listen"),
        flag(services["trainer-2"], "listen"),
    ]
    ports = [flag(service, "listen") for service in services.values() if service.name != "gateway"]
    ports += [flag(service, "metrics-port") for service in services.values() if service.name != "gateway"]
    assert len(set(ports)) == 8


def test_clients_on_this_machine_find_the_tokenizers_of_models_that_the_hub_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [ServedModel("/m/a", ("a", "tinsmith/a", "org/a")), ServedModel("org/c", ("org/c", "c"))]
    local = changed(make_stack(models), host="127.0.0.1")
    gateway = local.services(local.groups())[-1]
    assert json.loads(flag(gateway, "tokenizers")) == {"a": "/m/a", "tinsmith/a": "/m/a"}
    everywhere = changed(local, host="0.0.0.0")
    assert "--tokenizers" not in everywhere.services(everywhere.groups())[-1].argv
    monkeypatch.setenv("GATEWAY_TOKENIZERS", "{}")
    assert "--tokenizers" not in local.services(local.groups())[-1].argv


def test_several_samplers_are_known_to_their_trainer_and_to_the_gateway() -> None:
    stack = changed(make_stack([ServedModel("/m/a", ("a",)), ServedModel("/m/b", ("b",))]), samplers=2)
    groups = stack.groups()
    services = {service.name: service for service in stack.services(groups)}
    names = ["sampler-1-1", "sampler-1-2", "sampler-2-1", "sampler-2-2"]
    assert list(services) == ["trainer-1", "trainer-2", *names, "gateway"]
    addresses = [flag(services[name], "listen") for name in names]
    assert json.loads(flag(services["trainer-1"], "samplers")) == addresses[:2]
    assert json.loads(flag(services["trainer-2"], "samplers")) == addresses[2:]
    assert json.loads(flag(services["gateway"], "samplers")) == addresses
    assert f"; sampler: {', '.join(addresses)}; metrics:" in stack.summary(groups)
    alone = changed(make_stack([ServedModel("/m/a", ("a",))]), samplers=2)
    logs = [service.log.name for service in alone.services(alone.groups())]
    assert logs == ["trainer.log", "sampler-1.log", "sampler-2.log", "gateway.log"]


def test_every_service_is_started_again_unless_that_is_not_wanted() -> None:
    stack = make_stack([ServedModel("/m/a", ("a",))])
    assert [service.restarts for service in stack.services(stack.groups())] == [True] * 3
    alone = changed(stack, supervise=False)
    assert [service.restarts for service in alone.services(alone.groups())] == [False] * 3


@pytest.mark.parametrize("name", ["full-training", "deterministic"])
def test_how_to_train_is_a_flag_of_the_trainers(name: str) -> None:
    stack = make_stack([ServedModel("/m/a", ("a",))])
    # TRAINER_DETERMINISTIC and its like may say it
    assert f"--{name}" not in stack.services(stack.groups())[0].argv
    stack = changed(stack, **{name.replace("-", "_"): True})
    trainer, *others = stack.services(stack.groups())
    assert flag(trainer, name) == "true"
    assert not any(f"--{name}" in other.argv for other in others)


def test_the_engine_is_a_flag_of_the_samplers_and_full_training_takes_the_one_that_serves_every_model() -> None:
    stack = make_stack([ServedModel("/m/a", ("a",))])
    assert not any("--engine" in service.argv for service in stack.services(stack.groups()))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"engine": "vllm"}, "vllm"),
        ({"full_training": True}, "torch"),
        ({"full_training": True, "engine": "vllm"}, "vllm"),
    ]
    for given, engine in cases:
        trainer, sampler, gateway = changed(stack, **given).services(stack.groups())
        assert flag(sampler, "engine") == engine
        assert "--engine" not in [*trainer.argv, *gateway.argv]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_sampler_has_the_engine_whose_memory_was_planned_unless_one_is_named(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAMPLER_ENGINE", raising=False)
    plan = planned("2x-h100", "Qwen3-0.6B", engine=engine)
    stack = replace(make_stack([ServedModel("/m/a", ("a",))]), plans=[plan])

    def sampler(stack: Stack) -> Service:
        return next(one for one in stack.services(stack.groups()) if one.name.startswith("sampler"))

    assert flag(sampler(stack), "engine") == engine
    assert flag(sampler(changed(stack, engine="vllm")), "engine") == "vllm"
    monkeypatch.setenv("SAMPLER_ENGINE", "vllm")
    assert "--engine" not in sampler(stack).argv


def test_samplers_serve_the_ranks_that_their_trainers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAINER_MAX_LORA_RANK", "SAMPLER_MAX_LORA_RANK"):
        monkeypatch.delenv(name, raising=False)
    stack = make_stack([ServedModel("/m/a", ("a",))])
    trainer, sampler, _ = stack.services(stack.groups())
    assert "--max-lora-rank" not in [*trainer.argv, *sampler.argv]
    trainer, sampler, _ = changed(stack, max_lora_rank=128).services(stack.groups())
    assert flag(trainer, "max-lora-rank") == flag(sampler, "max-lora-rank") == "128"
    monkeypatch.setenv("TRAINER_MAX_LORA_RANK", "16")  # the trainer reads it itself
    trainer, sampler, _ = stack.services(stack.groups())
    assert "--max-lora-rank" not in trainer.argv
    assert flag(sampler, "max-lora-rank") == "16"
    monkeypatch.setenv("SAMPLER_MAX_LORA_RANK", "32")
    assert "--max-lora-rank" not in stack.services(stack.groups())[1].argv


def test_several_ranks_of_a_trainer_are_started_by_torchrun() -> None:
    stack = changed(make_stack([ServedModel("/m/a", ("a",))]), trainer_ranks=2)
    trainer, sampler, _ = stack.services(stack.groups())
    launcher = trainer.argv[3 : trainer.argv.index("trainer_service")]
    assert launcher[0] == "torch.distributed.run"
    assert launcher[-3:] == ["--nproc-per-node", "2", "-m"]
    assert launcher[launcher.index("--rdzv-backend") + 1] == "static"  # the others unpickle what their store holds
    assert launcher[launcher.index("--master-addr") + 1] == "127.0.0.1"
    assert trainer.env["OMP_NUM_THREADS"] == "1"
    assert sampler.argv[3] == "sampler_service"


def test_a_trainers_state_folder_does_not_depend_on_its_neighbours() -> None:
    a, b = ServedModel("/m/a", ("a",)), ServedModel("/n/a", ("b",))
    alone, beside = make_stack([a]), make_stack([b, a])
    folder = flag(alone.services(alone.groups())[0], "state-dir")
    folders = [flag(service, "state-dir") for service in beside.services(beside.groups())[:2]]
    assert folders[1] == folder != folders[0]


@pytest.mark.parametrize(("given", "second"), [("", "org/a-2"), ("mine", "mine-2")])
def test_several_trainers_have_names_of_their_own_in_a_shared_journal(
    given: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_JOURNAL_NAME", given)
    stack = make_stack([ServedModel("/m/a", ("org/a",))], trainers=2)
    trainers = [service for service in stack.services(stack.groups()) if service.name.startswith("trainer")]
    assert "--journal-name" not in trainers[0].argv, "the first has the name that it has alone"
    assert flag(trainers[1], "journal-name") == second


def test_keys_travel_by_environment_and_not_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAINER_API_KEYS", "SAMPLER_API_KEYS"):
        monkeypatch.delenv(name, raising=False)
    stack = make_stack([ServedModel("/m/a", ("a",))], keys=ServiceKeys('["tml-secret"]', "service-secret"))
    services = stack.services(stack.groups())
    for service in services:
        prefix = service.name.upper()
        assert service.env[f"{prefix}_API_KEYS"] == '["tml-secret"]'
        assert service.env[f"{prefix}_SERVICE_KEY"] == "service-secret"
    assert not any("secret" in part for service in services for part in service.argv)
    assert "secret" not in repr(stack)


def test_keys_that_the_user_has_set_for_one_service_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_API_KEYS", '["tml-other"]')
    keys = ServiceKeys('["tml-a"]', "s")
    assert keys.env("trainer") == {"TRAINER_API_KEYS": '["tml-other"]', "TRAINER_SERVICE_KEY": "s"}
    assert keys.env("gateway")["GATEWAY_API_KEYS"] == '["tml-a"]'


def test_without_keys_no_service_asks_for_one() -> None:
    stack = make_stack([ServedModel("/m/a", ("a",))])
    assert not any("KEY" in name for service in stack.services(stack.groups()) for name in service.env)


async def test_waiting_for_a_grpc_service_ends_when_it_serves() -> None:
    server = Server("127.0.0.1:0", [])
    await server.start()
    waiting = asyncio.create_task(wait_grpc(f"127.0.0.1:{server.port}"))
    assert not (await asyncio.wait({waiting}, timeout=0.3))[0]
    await server.set_serving(True)
    await waiting
    await server.stop(0)


async def test_waiting_for_the_gateway_ends_when_it_answers_200() -> None:
    answers = iter([b"503 Service Unavailable", b"200 OK"])
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 " + next(answers) + b"\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        await wait_gateway("127.0.0.1", server.sockets[0].getsockname()[1])
    assert asked == [b"GET /api/v1/healthz HTTP/1.1\r\n"] * 2


def test_fixed_ports_are_those_of_the_first_services_and_further_ones_follow() -> None:
    models = [ServedModel(f"/models/{name}", (name,)) for name in ("a", "b")]
    stack = changed(make_stack(models), samplers=2, trainer_port=8001, sampler_port=8101)
    groups = stack.groups()
    assert [trainer.port for group in groups for trainer in group.trainers] == [8001, 8002]
    assert [sampler.port for group in groups for sampler in group.samplers] == [8101, 8102, 8103, 8104]


def site(*roles: str, nodes: list[Node] | None = None, host: str = "127.0.0.1") -> Site:
    return Site(roles, host, Path("/state/cluster/services.json"), nodes or [])


def test_a_machine_of_several_runs_its_part_at_addresses_that_others_reach() -> None:
    models = [ServedModel("/m/a", ("a",)), ServedModel("/m/b", ("b",))]
    stack = replace(make_stack(models, samplers=2), site=site("sampler", host="10.0.0.3"), tls=Tls(folder=Path("/tls")))
    groups = stack.groups()
    services = stack.services(groups)
    assert [flag(service, "listen") for service in services] == [f"10.0.0.3:{port}" for port in range(8201, 8205)]
    assert {flag(service, "channel-host") for service in services} == {"10.0.0.3"}
    assert {flag(service, "grpc-ca") for service in services} == {"/tls/ca.pem"}
    assert stack.samplers(groups) == [flag(service, "listen") for service in services]
    assert stack.trainers(groups) == []
    assert stack.shares().sampler == max(1, usable_cores() // 4)

    stack = replace(make_stack(models[:1]), site=site("trainer", host="fd00::2"))
    groups = stack.groups()
    (trainer,) = stack.services(groups)
    assert stack.trainers(groups) == [flag(trainer, "listen")] == ["[fd00::2]:8101"]
    assert flag(trainer, "services-file") == "/state/cluster/services.json"
    assert "--samplers" not in trainer.argv
    assert stack.shares().trainer == usable_cores()

    stack = replace(make_stack(models[:1]), site=site("gateway"))
    (gateway,) = stack.services(stack.groups())
    assert flag(gateway, "services-file") == "/state/cluster/services.json"
    assert "--trainers" not in gateway.argv
    assert "--samplers" not in gateway.argv


def test_the_ranks_of_a_trainer_on_two_machines_meet_on_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    for rank in (0, 1):
        node = Node(rank, 2, "10.0.0.1", 8301)
        stack = replace(make_stack([ServedModel("/m/a", ("a",))], trainer_ranks=3), site=site("trainer", nodes=[node]))
        groups = stack.groups()
        (trainer,) = stack.services(groups)
        words = " ".join(trainer.argv)
        assert f"--nnodes 2 --rdzv-backend static --master-addr 10.0.0.1 --master-port 8301 --node-rank {rank}" in words
        assert "--nproc-per-node 3 -m trainer_service" in words
        assert len(stack.trainers(groups)) == 1 - rank, "one of them serves"
        assert trainer.env["GLOO_SOCKET_IFNAME"] == "lo"
        assert "NCCL_SOCKET_IFNAME" not in trainer.env, "the environment has it"
    one = replace(make_stack([ServedModel("/m/a", ("a",))]), site=site("trainer", nodes=[Node(0, 1, "10.0.0.1", 8301)]))
    assert "torch.distributed.run" not in one.services(one.groups())[0].argv
