"""Keys of gRPC services: what is accepted, what is refused, and where none are needed."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import SecretStr, ValidationError

from sampler_service.config import SamplerConfig
from tinsmith import errors
from tinsmith.rpc.auth import (
    ADMIN_SERVICES,
    ALONE,
    ApiKey,
    KeyRing,
    accepted,
    given_key,
    host_of,
    is_loopback,
    named,
    require_keys,
)
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.errors import from_rpc_error
from tinsmith.rpc.server import Server
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from trainer_service.config import TrainerConfig

KEYS = ["tml-first", "tml-second"]


class Sampler(sampler_pb2_grpc.SamplerServiceServicer):
    async def GetSamplerInfo(self, request: Any, context: Any) -> sampler_pb2.GetSamplerInfoResponse:
        return sampler_pb2.GetSamplerInfoResponse(engine="fake")

    async def StreamSample(self, request: Any, context: Any) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        yield sampler_pb2.StreamSampleResponse(delta=sampler_pb2.SampleDelta(index=1))


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    async def ImportCheckpoint(self, request_iterator: Any, context: Any) -> trainer_pb2.ImportCheckpointResponse:
        return trainer_pb2.ImportCheckpointResponse(
            notes=[piece.WhichOneof("piece") async for piece in request_iterator]
        )


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = Server("127.0.0.1:0", [sampler_pb2.DESCRIPTOR, trainer_pb2.DESCRIPTOR], api_keys=KEYS)
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Sampler(), server.grpc)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server.grpc)
    await server.start()
    await server.set_serving(True)
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


async def info(channel: grpc.aio.Channel, **kwargs: Any) -> str:
    stub: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
    return (await stub.GetSamplerInfo(sampler_pb2.GetSamplerInfoRequest(), timeout=5, **kwargs)).engine


async def calls(channel: grpc.aio.Channel) -> list[Any]:
    """One call of each kind: unary, server-streaming, client-streaming, bidirectional."""
    sampler: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
    trainer: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]

    async def all_of(stream: Any) -> list[Any]:
        return [message async for message in stream]

    async def imported() -> Any:
        for _ in range(5):
            try:
                return await trainer.ImportCheckpoint(iter(pieces), timeout=5)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.INTERNAL:
                    raise
        raise AssertionError("the refusal overtook a piece in each of five calls, which the client calls INTERNAL")

    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    pieces = [trainer_pb2.ImportCheckpointRequest(archive=b"x")] * 2
    waited = [
        info(channel),
        all_of(sampler.StreamSample(sampler_pb2.StreamSampleRequest(), timeout=5)),
        imported(),
        all_of(reflection.ServerReflectionInfo(iter([asked]), timeout=5)),
    ]
    results: list[Any] = []
    for one in waited:
        try:
            results.append(await one)
        except grpc.aio.AioRpcError as error:
            results.append(error)
    return results


@pytest.mark.parametrize("key", KEYS)
async def test_calls_of_every_kind_pass_with_any_of_the_keys(address: str, key: str) -> None:
    async with connect(address, api_key=key) as channel:
        engine, deltas, imported, services = await calls(channel)
    assert engine == "fake"
    assert deltas[0].delta.index == 1
    assert imported.notes == ["archive", "archive"]
    names = [service.name for service in services[0].list_services_response.service]
    assert "tinsmith.v1.SamplerService" in names


@pytest.mark.parametrize(("key", "what"), [("", "is missing"), ("tml-third", "holds no key of this service")])
async def test_calls_of_every_kind_are_refused_without_one(address: str, key: str, what: str) -> None:
    async with connect(address, api_key=key) as channel:
        for result in await calls(channel):
            assert isinstance(result, grpc.aio.AioRpcError)
            assert result.code() == grpc.StatusCode.UNAUTHENTICATED
            error = from_rpc_error(result)
            assert type(error) is errors.Unauthenticated
            assert error.message == f"the metadata x-api-key (or authorization: Bearer KEY) {what}"


async def test_an_ordinary_key_cannot_have_a_sampler_to_itself(address: str) -> None:
    """Others would wait, and after a while lose what they have in work."""
    async with connect(address, api_key=KEYS[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await info(channel, metadata=(ALONE,))
    error = from_rpc_error(refused.value)
    assert type(error) is errors.PermissionDenied
    assert "the metadata x-tinsmith-alone takes the service key, or one with admin" in error.message


@pytest.mark.parametrize("service", sorted(ADMIN_SERVICES))
async def test_an_ordinary_key_cannot_call_an_admin_service(service: str) -> None:
    keys: list[Any] = [KEYS[0], {"key": "tml-admin", "admin": True}]
    config = TrainerConfig.model_validate({"base_model": "m", "api_keys": keys, "service_key": "tml-service"})
    server = Server(
        "127.0.0.1:0", [sampler_pb2.DESCRIPTOR], api_keys=config.accepted_keys, admin_keys=config.admin_keys
    )
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Sampler(), server.grpc)
    await server.start()
    found: dict[str, grpc.StatusCode] = {}
    for key in (KEYS[0], "tml-admin", "tml-service"):
        async with connect(f"127.0.0.1:{server.port}", api_key=key) as channel:
            assert await info(channel) == "fake"
            if key != KEYS[0]:
                assert await info(channel, metadata=(ALONE,)) == "fake"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{service}/Any")(b"", timeout=5)
        found[key] = refused.value.code()
        if key == KEYS[0]:
            error = from_rpc_error(refused.value)
            assert type(error) is errors.PermissionDenied
            assert f"{service} takes the service key, or one with admin" in error.message
    await server.stop(0)
    passed = grpc.StatusCode.UNIMPLEMENTED  # the call came through to a server without that service
    assert found == {KEYS[0]: grpc.StatusCode.PERMISSION_DENIED, "tml-admin": passed, "tml-service": passed}


async def test_an_unknown_method_tells_nothing_to_a_caller_without_a_key(address: str) -> None:
    for key, code in (("", grpc.StatusCode.UNAUTHENTICATED), (KEYS[0], grpc.StatusCode.UNIMPLEMENTED)):
        async with connect(address, api_key=key) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/tinsmith.v1.SamplerService/NoSuch")(b"", timeout=5)
        assert refused.value.code() == code


@pytest.mark.parametrize(
    ("metadata", "passes"),
    [
        ((("x-api-key", "tml-first"),), True),
        ((("authorization", "Bearer tml-second"),), True),
        ((("authorization", "bearer tml-second"),), True),
        ((("authorization", "Basic tml-second"),), False),
        ((("authorization", "tml-second"),), False),
        ((("x-api-key", ""),), False),
        ((("x-api-key", "tml-firs"),), False),
        ((("x-api-key", "tml-first "),), False),
        ((("x-api-key-bin", b"tml-first"),), False),
    ],
)
async def test_the_key_is_read_from_two_places(address: str, metadata: Any, passes: bool) -> None:
    async with connect(address) as channel:
        if passes:
            assert await info(channel, metadata=metadata) == "fake"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await info(channel, metadata=metadata)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_health_checks_need_no_key(address: str) -> None:
    async with connect(address) as channel:
        assert await is_serving(channel)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="tinsmith.v1.SamplerService"), timeout=5)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_the_channels_key_goes_beside_a_calls_own_metadata() -> None:
    seen: list[dict[str, Any]] = []

    class Recorder(Sampler):
        async def GetSamplerInfo(self, request: Any, context: Any) -> sampler_pb2.GetSamplerInfoResponse:
            seen.append(dict(context.invocation_metadata()))
            return await super().GetSamplerInfo(request, context)

    server = Server("127.0.0.1:0", [sampler_pb2.DESCRIPTOR], api_keys=KEYS)
    sampler_pb2_grpc.add_SamplerServiceServicer_to_server(Recorder(), server.grpc)
    await server.start()
    async with connect(f"127.0.0.1:{server.port}", api_key=KEYS[0]) as channel:
        await info(channel, metadata=(("x-request-id", "r1"),))
    await server.stop(0)
    assert (seen[0]["x-request-id"], seen[0]["x-api-key"]) == ("r1", KEYS[0])


def test_a_key_ring_finds_positions_and_takes_no_prefix() -> None:
    ring = KeyRing(["a", "bb"])
    assert [ring.find(given) for given in ("a", "bb", "b", "", "bbb", "ä")] == [0, 1, None, None, None, None]
    assert KeyRing([]).find("") is None


def test_finding_a_key_compares_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time would tell which one it was."""
    compared: list[int] = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: compared.append(len(other)) or original(one, other))
    assert KeyRing(["a", "bb", "ccc"]).find("a") == 0
    assert compared == [32, 32, 32]  # digests: of one length, whatever the keys'


def test_headers_name_one_key() -> None:
    both = {"x-api-key": "a", "authorization": "Bearer b"}
    assert given_key(both) == "a"
    assert given_key({"authorization": "Bearer  b "}) == "b"
    assert given_key({}) == given_key({"authorization": "Bearer"}) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_addresses_need_no_key(host: str) -> None:
    assert is_loopback(host)
    require_keys(host, [], setting="host", env="X")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "trainer", "127.0.0.1.example"])
def test_others_do(host: str) -> None:
    require_keys(host, ["k"], setting="host", env="X_API_KEYS")
    with pytest.raises(ValueError, match=r"can be reached from other machines, so api_keys must .* \(X_API_KEYS="):
        require_keys(host, [], setting="host", env="X_API_KEYS")


@pytest.mark.parametrize("listen", ["nowhere", ":1", "host:", "host:http", "::1", "::1:80", "unix:/run/x"])
def test_an_address_is_host_and_port(listen: str) -> None:
    with pytest.raises(ValueError, match="is not of the form HOST:PORT"):
        host_of(listen)
    assert (host_of("a:1"), host_of("[::1]:80")) == ("a", "[::1]")


@pytest.mark.parametrize("config", [TrainerConfig, SamplerConfig])
def test_a_service_off_loopback_needs_an_api_key_or_the_service_key(config: Any) -> None:
    with pytest.raises(ValidationError, match=r"listen '0\.0\.0\.0' can be reached from other machines"):
        config(base_model="/m", listen="0.0.0.0:1")
    assert config(base_model="/m").accepted_keys == []
    assert config(base_model="/m", listen="0.0.0.0:1", service_key="s").accepted_keys == ["s"]
    both = config(base_model="/m", listen="[::]:1", api_keys=["a", {"key": "b", "name": "n"}], service_key="s")
    assert both.accepted_keys == ["a", "b", "s"]
    assert not any(f"'{key}'" in repr(both) or f'"{key}"' in both.model_dump_json() for key in "abs")


@pytest.mark.parametrize("key", ["", " ", "two words", "ключ", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    for api_keys in ([key], [{"key": key}]):
        with pytest.raises(ValidationError, match="visible ASCII"):
            TrainerConfig.model_validate({"base_model": "/m", "api_keys": api_keys})


def test_details_of_keys_are_optional() -> None:
    plain, full = named([SecretStr("a"), ApiKey(key=SecretStr("b"), name="n", note="o", email="e@x")])
    assert (plain.key.get_secret_value(), plain.name, plain.email) == ("a", "", "")
    assert full.name == "n"
    assert accepted([SecretStr("a"), full], SecretStr("")) == ["a", "b"]
    with pytest.raises(ValidationError, match=r"api_keys.0.details.nmae"):
        TrainerConfig.model_validate({"base_model": "/m", "api_keys": [{"key": "a", "nmae": "n"}]})
