"""unload_model, and the commands that end runs and sessions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from gateway import reaper
from gateway.database import sessions
from tests.support.waiting import until
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tinsmith_cli import main

pytestmark = pytest.mark.gateway(reap_interval_s=0.2)


async def test_a_run_ends_once_its_work_is_done(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id, other = await client.model(session_id), await client.model(session_id, seq=1)
    stack.trainer.go.clear()
    saved = await client.call("save_weights", {"model_id": model_id, "seq_id": 1, "path": "last"})
    receipt = await client.call("unload_model", {"model_id": model_id, "type": "unload_model"})
    assert receipt == {"request_id": f"{model_id}:unload", "model_id": model_id}
    error = await client.result((await client.forward_backward(model_id, 2)).json())
    assert (error["category"], "the run has ended" in error["error"]) == ("user", True)
    stack.trainer.go.set()
    assert (await client.result(saved))["path"] == f"tinker://{model_id}/weights/last"
    for _ in range(2):  # a repeat is answered the same way
        assert await client.result(receipt) == {"type": "unload_model", "model_id": model_id}
        receipt = await client.call("unload_model", {"model_id": model_id})
    assert stack.trainer.deleted_models == [model_id]
    await client.result((await client.forward_backward(other, 1)).json())  # the session goes on
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 16}}
    await client.call("create_model", create, status=422)
    await stack.restart_gateway()
    assert "model_seq_id: 0 is taken" in (await client.result(await client.call("create_model", create)))["error"]


@pytest.mark.parametrize("ends_session", [False, True])
async def test_work_of_an_ended_run_does_not_wait_for_numbers_that_never_came(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, ends_session: bool
) -> None:
    """The trainer would give them up after 15 minutes."""
    monkeypatch.setattr(reaper, "_LAST_S", 0.0)
    session_id = await client.session()
    model_id = await client.model(session_id)
    waiting = (await client.forward_backward(model_id, 3)).json()
    saved = await client.call("save_weights", {"model_id": model_id, "seq_id": 5, "path": "last"})
    if ends_session:
        await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    else:
        receipt = await client.call("unload_model", {"model_id": model_id})
        assert (await client.result(receipt))["model_id"] == model_id
    await client.result(waiting)
    assert (await client.result(saved))["path"] == f"tinker://{model_id}/weights/last"
    await until(lambda: stack.trainer.deleted_models == [model_id])
    assert stack.trainer.orders[model_id] == [0, 1, 2, 3, 4, 5]


async def test_the_checkpoints_of_an_ended_run_and_their_samplers_stay(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    body = {"model_id": model_id, "seq_id": 1, "path": "one"}
    path = (await client.result(await client.call("save_weights_for_sampler", body)))["path"]
    before = await client.sampling_session(session_id, model_path=path)
    await client.result(await client.call("unload_model", {"model_id": model_id}))
    after = await client.sampling_session(session_id, seq=1, model_path=path)
    for sampler_id in (before, after):
        await client.result(await client.call("asample", sample_body(sampler_id, 0)))


async def test_samplers_of_ephemeral_saves_of_an_ended_run_stay_until_their_session_ends(
    stack: Stack, client: Client
) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    samplers = []
    for seq_id in (1, 2):
        body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
        saved = await client.result(await client.call("save_weights_for_sampler", body))
        samplers.append(saved["sampling_session_id"])
    await client.result(await client.call("unload_model", {"model_id": model_id}))
    for seq_id, sampler_id in enumerate(samplers, 1):
        await client.result(await client.call("asample", sample_body(sampler_id, 0)))
        assert stack.sampler.requests[-1].version_id == f"{model_id}@{seq_id}"
    assert len(stack.trainer.checkpoints) == 2
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await until(lambda: not stack.trainer.checkpoints)


async def test_an_unload_goes_on_at_a_restarted_gateway(stack: Stack, client: Client) -> None:
    model_id = await client.model(await client.session())
    await stack.trainer_backend.stop()
    receipt = await client.call("unload_model", {"model_id": model_id})
    await stack.restart_gateway()
    await stack.trainer_backend.start()
    assert (await client.result(receipt))["model_id"] == model_id
    assert stack.trainer.deleted_models == [model_id]


async def test_only_the_owner_of_a_run_or_an_admin_ends_it(stack: Stack) -> None:
    keys = [
        {"key": "tml-ada", "owner": "ada"},
        {"key": "tml-bob", "owner": "bob"},
        {"key": "tml-root", "owner": "root", "admin": True},
    ]
    await stack.restart_gateway(api_keys=keys)

    def client_of(name: str) -> Client:
        return Client(base_url=stack.url, timeout=20, headers={"x-api-key": f"tml-{name}"})

    async with client_of("ada") as ada, client_of("bob") as bob, client_of("root") as root:
        session_id = await ada.session()
        model_id = await ada.model(session_id)
        for thing in (model_id, "nobody:train:0"):
            error = await bob.result(await bob.call("unload_model", {"model_id": thing}))
            assert (error["category"], f"there is no model {thing!r}" in error["error"]) == ("user", True)
        assert (await bob.poll(f"{model_id}:unload")).status_code == 410
        assert (await ada.poll(f"{model_id}:unload")).status_code == 410  # nobody has asked for it
        await ada.result((await ada.forward_backward(model_id, 1)).json())
        assert (await root.result(await root.call("unload_model", {"model_id": model_id})))["model_id"] == model_id


async def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = await asyncio.to_thread(main, words)
    caught = capsys.readouterr()
    return status, caught.out + caught.err


async def test_the_command_lists_and_ends_sessions_and_runs(
    stack: Stack, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [{"key": "tml-ada", "owner": "ada"}, {"key": "tml-bob", "owner": "bob"}]
    await stack.restart_gateway(api_keys=keys)
    monkeypatch.setenv("TINKER_BASE_URL", stack.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-ada")
    async with Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-ada"}) as ada:
        first = (await ada.call("create_session", {"display_name": "the first"}))["session_id"]
        second = await ada.session()
        model_id, other = await ada.model(first), await ada.model(first, seq=1)
        status, text = await command(capsys, "sessions", "list")
        assert (status, [line.split()[0] for line in text.splitlines()]) == (0, [second, first])
        assert text.splitlines()[1].endswith("the first")
        assert await command(capsys, "sessions", "end", model_id) == (0, f"{model_id} has ended\n")
        assert stack.trainer.deleted_models == [model_id]
        assert (await command(capsys, "sessions", "end", first))[0] == 0
        await ada.call("session_heartbeat", {"session_id": first}, status=410)
        assert [each.split()[0] for each in (await command(capsys, "sessions", "list"))[1].splitlines()] == [second]
        listed: Any = json.loads((await command(capsys, "sessions", "list", "--all", "--json"))[1])
        assert [each["session_id"] for each in listed] == [second, first]
        assert other.startswith(first)

        status, text = await command(capsys, "sessions", "end", second, "--api-key", "tml-bob")
        assert (status, "there is no session" in text) == (2, True)
        status, text = await command(capsys, "sessions", "end", f"{second}:train:7")
        assert (status, "there is no model" in text) == (2, True)
        await ada.call("session_heartbeat", {"session_id": second})


async def test_a_run_that_ends_while_its_row_is_read_is_not_taken_for_live(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """unload_model waited for ever for a run that was freed while the row was read that says so."""
    models = stack.gateway.store.models
    model_id = await client.model(await client.session())

    async def ends_meanwhile(db: AsyncSession, session_id: str) -> bool:
        await db.commit()  # the row that was read is older than this
        await models.end(model_id)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "is_live", ends_meanwhile)
        await models.complete(model_id, ended_at=None)  # so that it is read again
        await models.get(model_id)
    seen = await models.get(model_id)
    assert seen is not None
    assert seen.ended_at is not None
