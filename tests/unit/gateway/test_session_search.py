"""Sessions as a whole: lists, searches, projects."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tinker import types

from tests.unit.gateway.commits import Statements
from tests.unit.gateway.stack import Client, Stack
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save

pytestmark = pytest.mark.usefixtures("either_database")


async def make(client: Client, **fields: Any) -> str:
    return (await client.call("create_session", fields))["session_id"]


async def search(client: Client, **fields: Any) -> types.SessionSearchResponse:
    request = types.SessionSearchRequest.model_validate(fields)
    body = request.model_dump(mode="json", exclude_none=True)
    return types.SessionSearchResponse.model_validate(await client.call("sessions/search", body))


async def ids(client: Client, **fields: Any) -> list[str]:
    return [session.session_id for session in (await search(client, **fields)).sessions]


async def test_sessions_are_listed_newest_first(client: Client) -> None:
    made = [await make(client) for _ in range(3)]
    assert await get(client, "sessions", limit=2) == {"sessions": made[:0:-1]}
    assert await get(client, "sessions", limit=2, offset=2) == {"sessions": made[:1]}


async def test_a_session_names_its_runs_and_samplers(client: Client) -> None:
    session_id = await make(client, user_metadata={"k": "v"}, display_name="Name")
    runs = [await client.model(session_id, seq=n) for n in range(2)]
    sampler_id = await client.sampling_session(session_id)
    found = types.GetSessionResponse.model_validate(await get(client, f"sessions/{session_id}"))
    assert found.training_run_ids == runs
    assert found.sampler_ids == [sampler_id]
    assert (found.user_metadata, found.display_name) == ({"k": "v"}, "Name")


async def test_a_search_gives_what_is_known_of_a_session(client: Client) -> None:
    session_id = await make(client, project_id="p", display_name="Name", user_metadata={"k": "v"})
    run_id = await client.model(session_id)
    for seq_id in (1, 2):
        await save(client, run_id, seq_id, f"c{seq_id}")
    (found,) = (await search(client)).sessions
    assert found.session_id == session_id
    assert (found.project_id, found.owner) == ("p", "tml:organization_user:local")
    assert (found.checkpoints_count, found.checkpoint_storage_bytes) == (2, 200)
    assert (found.display_name, found.user_metadata) == ("Name", {"k": "v"})
    assert found.status == types.session_status.SessionActive()


async def test_searches_by_name_id_metadata_and_project(client: Client) -> None:
    a = await make(client, display_name="Nightly Run ÄB", user_metadata={"k": "v", "n": "1"}, project_id="p")
    b = await make(client, display_name="run two", user_metadata={"k": "v", "n": "2"})
    c = await make(client, user_metadata={'a"b.c': "x"})
    assert await ids(client) == [c, b, a]
    assert await ids(client, display_name="RUN") == [b, a]
    assert await ids(client, display_name="äb nightly") == [a]
    assert await ids(client, session_id=b) == [b]
    assert await ids(client, session_id=c, display_name="nightly") == [c, a]
    assert await ids(client, user_metadata={"k": "v"}) == [b, a]
    assert await ids(client, user_metadata={"k": "v", "n": "2"}) == [b]
    assert await ids(client, user_metadata={'a"b.c': "x"}) == [c]
    assert await ids(client, project_ids=["p"]) == [a]
    assert await ids(client, project_ids=["default"]) == [c, b]
    assert await ids(client, project_ids=[]) == []
    assert await ids(client, display_name="%") == []


async def test_searches_by_status(stack: Stack, client: Client) -> None:
    active, done, failed = [await make(client) for _ in range(3)]
    for session_id, reason in ((done, "success"), (failed, "errored")):
        body = {"reason": {"type": reason}, "detail": "because"}
        await client.call(f"sessions/{session_id}/finish", body)
    assert await ids(client, statuses=[{"type": "active"}]) == [active]
    assert await ids(client, statuses=[{"type": "client_finished"}]) == [failed, done]
    assert await ids(client, statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == [failed]
    assert await ids(client, statuses=[{"type": "cancelled"}, {"type": "failed"}]) == []
    finished = (await search(client, session_id=failed)).sessions[0].status
    assert isinstance(finished, types.session_status.ClientSessionFinished)
    assert (finished.reason.type, finished.detail) == ("errored", "because")
    assert stack.server is not None
    await stack.server.app.state.gateway.store.sessions.end(active, reason="expired", detail="silent")
    assert (await search(client, session_id=active)).sessions[0].status is None


async def test_a_search_goes_on_where_its_cursor_says(client: Client) -> None:
    made = [await make(client, display_name="x" if n % 2 else "y") for n in range(6)]
    found: list[str] = []
    cursor = None
    while True:
        page = await search(client, display_name="x", limit=2, cursor=cursor)
        found += [session.session_id for session in page.sessions]
        if (cursor := page.next_cursor) is None:
            break
    assert found == [made[5], made[3], made[1]]


@pytest.mark.gateway(api_keys=[{"key": "tml-test", "admin": True}, "tml-other"])
async def test_an_admin_searches_by_owner_and_others_find_their_own(stack: Stack, client: Client) -> None:
    mine = await make(client)
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-other"}) as other:
        theirs = await make(other)
        for owner in ({"type": "own"}, {"type": "accessible"}):
            assert await ids(other, owner=owner) == [theirs]
    assert await ids(client) == [mine]
    everyone = (await search(client, owner={"type": "accessible"})).sessions
    assert [session.session_id for session in everyone] == [theirs, mine]
    assert await ids(client, owner={"type": "user", "owner_urns": [everyone[0].owner]}) == [theirs]
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-other"}) as other:
        assert await ids(other, owner={"type": "user", "owner_urns": [everyone[1].owner]}) == []


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"limit": 201}, "limit"),
        ({"display_name": ""}, "display_name"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "other"}]}, "statuses"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "cursor.last_created_at"),
    ],
)
async def test_searches_that_make_no_sense_are_refused_by_name(client: Client, body: dict[str, Any], part: str) -> None:
    assert (await client.call("sessions/search", body, status=400))["detail"].startswith(part)


async def test_a_session_moves_into_a_project_and_the_audit_log_says_so(client: Client) -> None:
    session_id = await make(client, project_id="p")
    for _ in range(2):
        reply = await client.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": "q"})
        assert reply.status_code == 200
    (found,) = (await search(client, project_ids=["q"])).sessions
    assert found.session_id == session_id
    (entry,) = (await get(client, "audit", event_type="projects"))["entries"]
    assert entry["event"] == "project_assign"
    assert entry["event_details"] == {
        "actor": "tml:organization_user:local",
        "session_id": session_id,
        "project_id": "q",
        "previous_project_id": "p",
    }


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "sessions/none", None),
        ("PUT", "sessions/none/project", {"project_id": "p"}),
        ("GET", "sessions/none/trace_export", None),
    ],
)
async def test_unknown_sessions(client: Client, method: str, path: str, body: Any) -> None:
    reply = await client.request(method, f"/api/v1/{path}", json=body)
    assert reply.status_code == 404
    assert "none" in reply.json()["detail"]


async def test_a_finish_for_another_reason_is_refused_by_name(client: Client) -> None:
    session_id = await make(client)
    body = {"reason": {"type": "expired"}}
    assert "reason.type" in (await client.call(f"sessions/{session_id}/finish", body, status=400))["detail"]
    await client.call("session_heartbeat", {"session_id": session_id})


async def test_a_session_begins_with_what_its_user_must_know(client: Client) -> None:
    message = (await client.call("create_session", {}))["info_message"]
    assert all(word in message for word in ("Tinsmith", "stable_reinforce", "dimuon", "docs/algorithms.md"))


@pytest.mark.parametrize(
    "field",
    [
        {"project_ids": ["x"] * 101},
        {"statuses": [{"type": "active"}] * 17},
        {"statuses": [{"type": "client_finished", "reasons": ["success"] * 17}]},
    ],
    ids=["projects", "statuses", "reasons"],
)
async def test_a_search_is_bounded(client: Client, field: dict[str, Any]) -> None:
    reply = await client.post("/api/v1/sessions/search", json=field)
    assert reply.status_code == 400
    assert next(iter(field)) in reply.json()["detail"]


@pytest.mark.parametrize(
    "query",
    [{"display_name": "needle"}, {"project_ids": ["needle"]}, {"user_metadata": {"k": "needle"}}],
    ids=["name", "project", "metadata"],
)
async def test_a_search_looks_at_a_bounded_number_of_sessions_and_goes_on(
    client: Client, monkeypatch: pytest.MonkeyPatch, query: dict[str, Any]
) -> None:
    """Whatever it asks for: the database goes through no more of them than are compared."""
    monkeypatch.setattr("gateway.session_search._SCANNED_ROWS", 2)
    monkeypatch.setattr("gateway.session_search.MAX_SCANNED", 4)
    wanted = await make(client, display_name="needle", project_id="needle", user_metadata={"k": "needle"})
    for _ in range(9):
        await make(client, display_name="hay")
    found: list[str] = []
    cursor, num_pages = None, 0
    while num_pages == 0 or cursor is not None:
        page = await search(client, **query, cursor=cursor)
        found += [session.session_id for session in page.sessions]
        cursor, num_pages = page.next_cursor, num_pages + 1
        assert num_pages < 9
    assert (found, num_pages) == ([wanted], 3)


def _without_casts(statement: str) -> str:
    """Without the text that the database compares for itself."""
    return re.sub(r"CAST\(sessions\.user_metadata AS \w+\)", "", statement)


async def test_a_search_loads_the_metadata_of_few_sessions(stack: Stack, client: Client) -> None:
    """A search of 1,500 sessions with much metadata took 4 s of the event loop."""
    wanted = await make(client, display_name="needle", user_metadata={"k": "wanted", "other": "x"})
    for n in range(5):
        await make(client, display_name="hay", user_metadata={"k": f"other {n}"})
    queries: dict[str, dict[str, Any]] = {
        "name": {"display_name": "needle"},
        "notes": {"user_metadata": {"k": "wanted"}},
    }
    for query in queries.values():
        statements = Statements(stack.gateway.store)
        assert await ids(client, **query) == [wanted]
        with_metadata = [each for each in statements.of_all if "sessions.user_metadata" in _without_casts(each)]
        assert with_metadata, statements.of_all
        assert all("sessions.session_id IN" in each for each in with_metadata), with_metadata


async def test_metadata_that_the_database_cannot_tell_apart_is_loaded_a_few_sessions_at_a_time(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database compares one entry. Sessions that differ in another entry were loaded by 500: 32 MB of JSON at
    once."""
    monkeypatch.setattr("gateway.session_search._LOADED_ROWS", 2)
    made = [await make(client, user_metadata={"k": "the longest", "n": str(n)}) for n in range(7)]
    statements = Statements(stack.gateway.store)
    assert await ids(client, user_metadata={"k": "the longest", "n": "3"}) == [made[3]]
    loading = [
        each for each in statements.of_all if each.startswith("SELECT sessions.session_id, sessions.user_metadata")
    ]
    assert len(loading) == 4, statements.of_all


@pytest.mark.parametrize(
    "value",
    ['50% "of_all" \\ ', "ä❄\u2028", "x" * 3000, "%" * 60_000, "A"],
    ids=["marks", "letters", "long", "wild", "A"],
)
async def test_metadata_is_found_whatever_it_holds(client: Client, value: str) -> None:
    wanted = await make(client, user_metadata={"k": value, "second": "1"})
    for other in (value + "x", "x" + value, value.lower() + " "):
        await make(client, user_metadata={"k": other, "second": "1"})
    await make(client, user_metadata={"other": value})
    assert await ids(client, user_metadata={"k": value, "second": "1"}) == [wanted]


async def test_a_search_takes_as_much_metadata_as_a_session(client: Client) -> None:
    notes = {f"k{n}": f"v{n}" for n in range(1000)}
    wanted = await make(client, user_metadata=notes)
    await make(client, user_metadata={**notes, "k999": "other"})
    assert await ids(client, user_metadata=notes) == [wanted]
