"""The paths of the hosted service, beside this server's own."""

from __future__ import annotations

import httpx
import pytest

from gateway.http import middleware
from tests.unit.gateway import sdk_programs
from tests.unit.gateway.stack import BASE_MODEL, Stack
from tests.unit.gateway.test_sdk import run_program

OWN, FRONT = ("/v1", "/api/v1"), "/services/tinker-prod"
HOSTED = [("/oai/api/v1", "/api/v1"), (f"{FRONT}/oai/api/v1", f"{FRONT}/api/v1")]


@pytest.mark.parametrize(("openai", "tinker"), HOSTED)
async def test_the_paths_of_the_hosted_service_lead_to_the_same_answers(stack: Stack, openai: str, tinker: str) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        for path in ("/models", f"/models/{BASE_MODEL}"):
            own, hosted = await client.get(OWN[0] + path), await client.get(openai + path)
            assert (hosted.status_code, hosted.json()) == (200, own.json())
        for path in ("/embeddings", "/models/no/model"):  # errors in OpenAI's form
            own, hosted = await client.get(OWN[0] + path), await client.get(openai + path)
            assert (hosted.status_code, hosted.json()) == (404, own.json())
        own, hosted = [await client.get(f"{base}/get_server_capabilities") for base in (OWN[1], tinker)]
        assert (hosted.status_code, hosted.json()) == (200, own.json())
        for path in ("/oai/v1/models", f"{FRONT}x/v1/models", f"{FRONT}{FRONT}/v1/models", f"{FRONT}api/v1/sessions"):
            assert (await client.get(path)).status_code == 404, path


@pytest.mark.parametrize(("openai", "tinker"), HOSTED)
@pytest.mark.gateway(api_keys=["tml-one"])
async def test_the_paths_of_the_hosted_service_need_a_key_as_the_own_ones(
    stack: Stack, openai: str, tinker: str
) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        for path in (f"{openai}/models", f"{tinker}/sessions", f"{FRONT}/dashboard/api/runs"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.get(f"{openai}/models")).json()["error"]["code"] == "invalid_api_key"
        for path in (f"{openai}/models", f"{tinker}/sessions"):
            reply = await client.get(path, headers={"authorization": "Bearer tml-one"})
            assert reply.status_code == 200, path


async def test_openais_resources_are_found_below_the_tinker_apis_base_url(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        document = (await client.get("/openapi.json")).json()
        paths = document["paths"]
        resources = {path.removeprefix("/v1/"): set(paths[path]) for path in paths if path.startswith("/v1/")}
        del resources["models/{model}"]  # early SDKs have models/{run_id}/checkpoints
        assert {f"/api/v1/{name}" for name in resources} == middleware._OPENAI_BELOW_TINKER
        assert not {f"/api/v1/{name}" for name in resources} & {*paths}
        for path, methods in resources.items():
            for method in methods:
                own, other = [await client.request(method, f"{base}/{path}", json={}) for base in OWN]
                assert own.status_code in (200, 400, 422), (own.status_code, own.text)
                assert (other.status_code, other.json()) == (own.status_code, own.json()), path
        for path in ("/api/v1/modelsx", f"/api/v1/models/{BASE_MODEL}", "/api/v1/chat", "/api/v2/models"):
            assert (await client.get(path)).status_code == 404, path


@pytest.mark.gateway(api_keys=["tml-one"])
async def test_openais_resources_below_the_tinker_api_need_a_key(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        reply = await client.get("/api/v1/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await client.get("/api/v1/models", headers={"authorization": "Bearer tml-one"})).status_code == 200


async def test_the_sdk_trains_below_the_path_of_its_default_base_url(stack: Stack) -> None:
    await run_program(sdk_programs.train_save_load_and_sample, stack.url + FRONT)
