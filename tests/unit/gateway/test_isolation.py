"""One owner cannot see, use, change or guess what is another's: every endpoint, asked with a foreign key.

For a foreign id the answer is that for an id which does not exist, word for word. The first test fails when a route is
neither asked here nor exempt for a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, Route

from gateway.http.app import ROUTES
from gateway.tenants.keys import Keys
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, batch, sample_body
from tests.unit.gateway.talking import TalkingSampler
from tests.unit.gateway.test_custom_losses import loss

pytestmark = pytest.mark.gateway(sampler=TalkingSampler, openai_wait_s=0.3, long_poll_s=0.2)

API = "/api/v1"
GHOST = "0" * 32
"""A session that does not exist."""
CHECKPOINT = f"{API}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}"

EXEMPT = {
    "GET /metrics": "sums over all owners, without ids",
    "GET /openapi.json": "says what routes there are",
    "GET /": "the page, without data",
    f"GET {API}/healthz": "says that the gateway runs",
    f"POST {API}/client/config": "flags, the same for all",
    f"POST {API}/client/dynamic_config": "flags, the same for all",
    f"GET {API}/get_server_capabilities": "base models, the same for all",
    f"POST {API}/auth/token": "names nothing: the key's own JWT",
    f"GET {API}/auth/apikey/me": "names nothing: the key itself",
    f"DELETE {API}/auth/apikey/me": "names nothing: the key itself",
    f"POST {API}/create_session": "names nothing: makes a session of the key's owner",
    f"POST {API}/telemetry": "is thrown away unread",
    f"GET {API}/trainers": "is for admins",
    f"POST {API}/trainers/drain": "is for admins",
    f"POST {API}/trainers/undrain": "is for admins",
    f"POST {API}/checkpoints/import": "names nothing: makes a checkpoint of the key's owner",
    f"DELETE {API}/training_runs/{{run_id}}/checkpoints/{{name}}": "looks nothing up: asks for the kind",
    f"POST {API}/training_runs/{{run_id}}/checkpoints/{{name}}/publish": "looks nothing up: asks for the kind",
    f"PUT {API}/training_runs/{{run_id}}/checkpoints/{{name}}/ttl": "looks nothing up: asks for the kind",
    "GET /download/files/{run_id}/{kind}/{name}/{file}": "is opened by a signature, which the owner was given",
    "GET /download/archives/{run_id}/{kind}/{name}": "is opened by a signature, which the owner was given",
    "GET /download/traces/{session_id}": "is opened by a signature, which the owner was given",
}
"""Method and path -> why no foreign id can be given there."""


@dataclass(frozen=True)
class Case:
    """A request about things of $session: its run $session:train:0, its sampler $session:sample:0, and so on."""

    route: str
    body: Any = None
    path: dict[str, str] | None = None
    content: str = ""
    """Not JSON: which batch."""
    query: str = ""
    lists: bool = False
    """It names nothing; its answer must not."""

    def request(self, session_id: str, *, seq_id: int = 9) -> tuple[str, str, dict[str, Any]]:
        method, _, path = self.route.partition(" ")
        for name, value in (self.path or {}).items():
            path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
        options: dict[str, Any] = {}
        if self.content:
            message = batch(RUN.replace("$session", session_id), seq_id, loss_fn=self.content)
            options["content"] = message.SerializeToString()
            options["headers"] = {"content-type": "application/x-protobuf"}
        elif self.body is not None:
            text = json.dumps(self.body).replace("$session", session_id)
            options["json"] = json.loads(text.replace('"seq_id": 9', f'"seq_id": {seq_id}'))
        return method, (path + self.query).replace("$session", session_id), options


RUN, SAMPLER = "$session:train:0", "$session:sample:0"
SAVED = f"tinker://{RUN}/weights/one"
_OPERATION = {"model_id": RUN, "seq_id": 9}
_SAVED = {"run_id": RUN, "kind": "weights", "name": "one"}
_EXTERNAL = {"run_id": RUN, "kind": "external_weights", "name": "three"}
_SAMPLED = f"tinker://{RUN}/sampler_weights/two"
DAY = "?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"

CASES = [
    Case(f"POST {API}/session_heartbeat", {"session_id": "$session"}),
    Case(f"GET {API}/sessions", lists=True),
    Case(f"GET {API}/sessions", query="?access_scope=accessible", lists=True),
    Case(f"POST {API}/sessions/search", {"owner": {"type": "accessible"}}, lists=True),
    Case(f"POST {API}/sessions/search", {"session_id": "$session", "owner": {"type": "accessible"}}),
    Case(f"GET {API}/sessions/{{session_id}}", path={"session_id": "$session"}),
    Case(f"GET {API}/sessions/{{session_id}}", path={"session_id": "$session"}, query="?access_scope=accessible"),
    Case(f"PUT {API}/sessions/{{session_id}}/project", {"project_id": "p"}, path={"session_id": "$session"}),
    Case(f"GET {API}/sessions/{{session_id}}/trace_export", path={"session_id": "$session"}),
    Case(
        f"POST {API}/create_model",
        {"session_id": "$session", "model_seq_id": 7, "base_model": BASE_MODEL, "lora_config": {"rank": 8}},
    ),
    Case(f"POST {API}/get_info", {"model_id": RUN}),
    Case(f"POST {API}/unload_model", {"model_id": RUN}),
    Case(f"POST {API}/optim_step", {"model_id": RUN, "adam_params": {}}),
    Case(f"POST {API}/forward", {"model_id": RUN, "forward_input": {"data": [], "loss_fn": "cross_entropy"}}),
    Case(f"POST {API}/forward_backward", content="cross_entropy"),
    Case(f"POST {API}/forward_backward", content="custom"),
    Case(f"POST {API}/forward_backward", content="stable_reinforce"),
    Case(
        f"POST {API}/forward",
        _OPERATION | {"forward_input": {"data": [], "loss_fn": "cross_entropy"}},
    ),
    Case(f"POST {API}/optim_step", _OPERATION | {"adam_params": {"learning_rate": 1e-4}}),
    Case(f"POST {API}/create_custom_loss", loss("$session", custom_loss_seq_id=3)),
    Case(f"POST {API}/save_weights", _OPERATION | {"path": "one", "overwrite": True}),
    Case(f"POST {API}/save_weights_for_sampler", _OPERATION | {"path": "four"}),
    Case(f"POST {API}/save_weights_for_sampler", _OPERATION | {"sampling_session_seq_id": 5}),
    Case(f"POST {API}/save_weights_external", _OPERATION | {"path": "four"}),
    Case(f"POST {API}/load_weights", _OPERATION | {"path": SAVED, "optimizer": True}),
    Case(f"POST {API}/load_weights", {"session_id": "$session", "model_seq_id": 8, "path": SAVED, "optimizer": True}),
    Case(f"POST {API}/weights_info", {"tinker_path": SAVED}),
    Case(f"POST {API}/copy_weights", {"source_path": SAVED, "destination_project_id": "p"}),
    Case(
        f"POST {API}/create_sampling_session",
        {"session_id": "$session", "sampling_session_seq_id": 6, "base_model": BASE_MODEL},
    ),
    Case(f"POST {API}/join_sampling_session", {"sampling_session_id": SAMPLER}),
    Case(f"GET {API}/samplers/{{sampling_session_id}}", path={"sampling_session_id": SAMPLER}),
    Case(f"GET {API}/samplers/{{sampling_session_id}}/certificate", path={"sampling_session_id": SAMPLER}),
    Case(f"POST {API}/asample", sample_body(SAMPLER, 9)),
    Case(f"POST {API}/asample", sample_body(SAMPLER, 9) | {"seq_id": None}),
    Case(f"POST {API}/asample", sample_body(SAMPLER, 9) | {"sampling_session_id": None, "model_path": SAVED}),
    *(
        Case(f"POST {API}/retrieve_future", {"request_id": request_id})
        for request_id in (f"{RUN}:0", f"{RUN}:1", f"{RUN}:unload", f"{SAMPLER}:0", "$session:loss:0")
    ),
    Case(
        f"POST {API}/retrieve_futures",
        {
            "target": {"type": "sampling_session", "sampling_session_id": SAMPLER, "cloned_sampler_id": 0},
            "retrieved_request_ids": [f"{SAMPLER}:0"],
            "prev_cursor": 0,
            "timeout": 0,
        },
    ),
    Case(f"POST {API}/cancel_future", {"request_id": f"{SAMPLER}:0"}),
    Case(f"GET {API}/training_runs", lists=True),
    Case(f"GET {API}/training_runs", query="?access_scope=accessible", lists=True),
    Case(f"GET {API}/training_runs/{{run_id}}", path={"run_id": RUN}),
    Case(f"GET {API}/training_runs/{{run_id}}", path={"run_id": RUN}, query="?access_scope=accessible"),
    Case(f"GET {API}/training_runs/{{run_id}}/checkpoints", path={"run_id": RUN}),
    Case(f"GET {API}/models/{{run_id}}/checkpoints", path={"run_id": RUN}),
    Case(f"GET {API}/checkpoints", lists=True),
    Case(f"GET {API}/training_runs/{{run_id}}/retention", path={"run_id": RUN}),
    Case(f"PUT {API}/training_runs/{{run_id}}/retention", {"training": {"keep_last": 3}}, path={"run_id": RUN}),
    Case(f"POST {API}/training_runs/{{run_id}}/retention/prune", {"dry_run": True}, path={"run_id": RUN}),
    Case(f"DELETE {API}/training_runs/{{run_id}}/retention", path={"run_id": RUN}),
    Case(f"GET {CHECKPOINT}", path=_SAVED),
    Case(f"GET {CHECKPOINT}/verify", path=_SAVED),
    Case(f"POST {CHECKPOINT}/pin", path=_SAVED),
    Case(f"DELETE {CHECKPOINT}/pin", path=_SAVED),
    Case(f"PUT {CHECKPOINT}/ttl", {"ttl_seconds": None}, path=_SAVED),
    Case(f"GET {CHECKPOINT}/external_weights_urls", path=_EXTERNAL),
    Case(f"GET {CHECKPOINT}/archive", path=_SAVED),
    Case(f"GET {CHECKPOINT}/certificate", path=_SAVED | {"kind": "sampler_weights", "name": "two"}),
    Case(f"GET {API}/audit", lists=True),
    Case(f"GET {API}/billing/usage/events", query="TODAY", lists=True),
    Case(f"GET {API}/billing/usage/checkpoints/current", lists=True),
    Case("GET /v1/models", lists=True),
    Case("GET /v1/models/{model:path}", path={"model": _SAMPLED}),
    Case("POST /v1/completions", {"model": _SAMPLED, "prompt": "the", "max_tokens": 2}),
    Case("POST /v1/chat/completions", {"model": _SAMPLED, "messages": [{"role": "user", "content": "the"}]}),
    Case("POST /v1/responses", {"model": _SAMPLED, "input": "the"}),
    Case("GET /dashboard/api/overview", lists=True),
    Case("GET /dashboard/api/services", lists=True),
    Case("GET /dashboard/api/sessions", lists=True),
    Case("GET /dashboard/api/runs/{run_id}", path={"run_id": RUN}),
    Case("GET /dashboard/api/runs/{run_id}/history", path={"run_id": RUN}),
    Case("GET /dashboard/api/runs/{run_id}/samples", path={"run_id": RUN}),
    Case("GET /dashboard/api/checkpoints/{run_id}/{kind}/{name}/download", path=_SAVED),
    # Calls that delete or end something come last, because the owner makes them, too.
    Case(f"POST {CHECKPOINT}/publish", path=_SAVED),
    Case(f"DELETE {CHECKPOINT}/publish", path=_SAVED),
    Case(f"DELETE {CHECKPOINT}", path=_SAVED),
    Case(
        f"POST {API}/sessions/{{session_id}}/finish",
        {"reason": {"type": "success"}, "detail": None},
        path={"session_id": "$session"},
    ),
]


def walk(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield from walk(route.routes, prefix + route.path)
        elif isinstance(route, Route) and route.path != "/{path:path}":
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield f"{method} {prefix}{route.path}"


def test_every_route_is_asked_with_a_foreign_key_or_exempt_for_a_reason() -> None:
    routes, asked = set(walk(ROUTES)), {case.route for case in CASES}
    assert routes - asked - set(EXEMPT) == set()
    assert (asked | set(EXEMPT)) - routes == set()
    assert asked & set(EXEMPT) == set()


@dataclass
class People:
    zoe: Client
    bob: Client
    eve: Client
    """An admin."""


@pytest.fixture
async def people(stack: Stack) -> AsyncIterator[People]:
    assert stack.server is not None
    keys: Keys = stack.server.app.state.gateway.tenants.keys
    made = {name: (await keys.create(name, admin=name == "eve"))[0] for name in ("zoe", "bob", "eve")}
    clients = [
        Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}, follow_redirects=False)
        for key in made.values()
    ]
    await stack.server.app.state.gateway.tenants.callers.read()
    yield People(*clients)
    for client in clients:
        await client.aclose()


async def things_of(client: Client) -> str:
    """A session with one of everything."""
    session_id = await client.session()
    run_id = await client.model(session_id)
    await client.result((await client.forward_backward(run_id, 1)).json())
    for seq_id, (endpoint, name) in enumerate(
        [("save_weights", "one"), ("save_weights_for_sampler", "two"), ("save_weights_external", "three")], start=2
    ):
        await client.result(await client.call(endpoint, {"model_id": run_id, "seq_id": seq_id, "path": name}))
    sampler_id = await client.sampling_session(session_id, model_path=f"tinker://{run_id}/sampler_weights/two")
    await client.result(await client.call("asample", sample_body(sampler_id, 0, record_stability_info=True)))
    await client.result(await client.call("create_custom_loss", loss(session_id)))
    return session_id


async def ask(client: Client, case: Case, session_id: str, *, seq_id: int = 9) -> httpx.Response:
    method, path, options = case.request(session_id, seq_id=seq_id)
    if "TODAY" in path:
        from datetime import UTC, datetime, timedelta

        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        begin, end = (at.strftime("%Y-%m-%dT%H:00:00Z") for at in (now - timedelta(hours=1), now + timedelta(hours=2)))
        path = path.replace("TODAY", f"?starting_on={begin}&ending_before={end}")
    return await client.request(method, path, **options)


async def answer(client: Client, case: Case, session_id: str) -> tuple[int, str]:
    """Status and text, without what is different in each; of a receipt what became of it, too."""
    reply = await ask(client, case, session_id)
    text = reply.text
    if reply.status_code == 200 and "json" in reply.headers["content-type"] and "request_id" in reply.json():
        text += str(await client.result(reply.json()))
    text = re.sub(r"refused:[0-9a-f:]+", "REFUSED", text.replace(session_id, "SESSION"))
    return reply.status_code, text


async def test_a_foreign_id_is_answered_as_one_that_does_not_exist(stack: Stack, people: People) -> None:
    session_id = await things_of(people.zoe)
    answers = []
    for case in CASES:
        foreign = await answer(people.bob, case, session_id)
        answers.append(foreign)
        if case.lists:
            assert foreign[0] == 200, (case, foreign)
            assert "SESSION" not in foreign[1], (case, foreign)
            assert "zoe" not in foreign[1], (case, foreign)
        else:
            assert foreign == await answer(people.bob, case, GHOST), case
    # All of it is there as before, and nothing took the place of what its owner does next.
    same = []
    for seq_id, (case, foreign) in enumerate(zip(CASES, answers, strict=True), start=5):
        mine = await ask(people.zoe, case, session_id, seq_id=seq_id)
        assert mine.status_code < 500, (case, mine.text)
        if (mine.status_code, mine.text.replace(session_id, "SESSION")) == foreign:
            same.append(case.route)
        elif case.lists and "services" not in case.route:
            assert session_id in mine.text or "zoe" in mine.text, (case, mine.text)
    assert set(same) - {"GET /dashboard/api/services"} == {f"POST {API}/cancel_future"}  # they say the same to all


async def test_a_published_checkpoint_is_read_by_everyone_and_changed_by_its_owner(people: People) -> None:
    session_id = await things_of(people.zoe)
    run_id, mine = f"{session_id}:train:0", await people.bob.session()
    base = f"{API}/training_runs/{run_id}/checkpoints"
    for kind, name in (("weights", "one"), ("sampler_weights", "two"), ("external_weights", "three")):
        assert (await people.zoe.post(f"{base}/{kind}/{name}/publish")).status_code == 200
    saved, sampled = f"tinker://{run_id}/weights/one", f"tinker://{run_id}/sampler_weights/two"
    bob = people.bob
    await bob.call("weights_info", {"tinker_path": saved})
    loaded = {"session_id": mine, "model_seq_id": 0, "path": saved, "optimizer": True}
    assert (await bob.result(await bob.call("load_weights", loaded)))["model_id"] == f"{mine}:train:0"
    sampler_id = await bob.sampling_session(mine, model_path=sampled)
    assert isinstance(await bob.result(await bob.call("asample", sample_body(sampler_id, 0))), bytes)
    completed = await bob.post("/v1/completions", json={"model": sampled, "prompt": "the", "max_tokens": 2})
    assert completed.status_code == 200, completed.text
    copied = await bob.call("copy_weights", {"source_path": saved, "destination_project_id": "p"})
    assert copied["tinker_path"] != saved
    assert (await bob.get(f"{base}/external_weights/three/external_weights_urls")).status_code == 200
    archive = await bob.get(f"{base}/sampler_weights/two/archive")
    assert archive.status_code == 302
    for method, path, body in (
        ("DELETE", "", None),
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
        ("PUT", "/ttl", {"ttl_seconds": 3600}),
    ):
        refused = await bob.request(method, f"{base}/weights/one{path}", json=body)
        assert refused.status_code == 404, (method, path)
        assert refused.json()["detail"] == f"path: there is no checkpoint {saved}"
    assert (await bob.get(base)).status_code == 404  # which others there are
    assert (await people.zoe.delete(f"{base}/weights/one/publish")).status_code == 200
    await bob.call("weights_info", {"tinker_path": saved}, status=404)


async def test_an_admin_sees_and_changes_everything(people: People) -> None:
    session_id = await things_of(people.zoe)
    for seq_id, case in enumerate(CASES, start=5):
        reply = await ask(people.eve, case, session_id, seq_id=seq_id)
        is_own = case.route in (f"GET {API}/sessions", f"GET {API}/training_runs") and not case.query
        if case.lists and not is_own and case.route not in (f"GET {API}/checkpoints", "GET /v1/models"):
            assert session_id in reply.text or "zoe" in reply.text or "services" in case.route, case
        if not case.lists and not case.route.startswith(("GET", "POST")):
            assert reply.status_code == 200, (case, reply.text)


async def test_each_owner_has_a_salt_of_its_own_in_the_samplers_prefix_caches(stack: Stack, people: People) -> None:
    """Or `prompt_cache_hit_tokens` would tell what others have sent."""
    assert stack.server is not None
    key, _ = await stack.server.app.state.gateway.tenants.keys.create("zoe", name="second")
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) as second:
        salts = []
        for client in (people.zoe, people.bob, second):
            begin = len(stack.sampler.requests)
            sampler_id = await client.sampling_session(await client.session())
            await client.result(await client.call("asample", sample_body(sampler_id, 0)))
            for stream in (False, True):
                body = {"model": BASE_MODEL, "max_tokens": 2, "stream": stream}
                for endpoint, prompt in (
                    ("completions", {"prompt": "the"}),
                    ("chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
                ):
                    assert (await client.post(f"/v1/{endpoint}", json=body | prompt)).status_code == 200
            sent = [request.cache_salt for request in stack.sampler.requests[begin:]]
            assert len(sent) == 5
            assert len(set(sent)) == 1
            salts.append(sent[0])
    zoe, bob, again = salts
    assert zoe == again != bob
    assert all(len(salt) == 32 for salt in salts)


async def test_keys_of_one_owner_share_everything(stack: Stack, people: People) -> None:
    session_id = await things_of(people.zoe)
    assert stack.server is not None
    key, _ = await stack.server.app.state.gateway.tenants.keys.create("zoe", name="second")  # found when it first comes
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": key}) as other:
        assert (await other.call("get_info", {"model_id": f"{session_id}:train:0"}))["model_name"] == BASE_MODEL
        await other.result((await other.forward_backward(f"{session_id}:train:0", 5)).json())
        listed = (await other.get(f"{API}/sessions")).json()["sessions"]
        assert listed == [session_id]
