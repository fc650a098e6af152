"""Checkpoints that retention policies delete, and those that they never delete, by themselves and on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from gateway.config import GatewayConfig
from gateway.database.tables.checkpoints import DELETED_AT, Checkpoint, RetentionPolicy
from gateway.schemas import Policy, RetentionRules
from gateway.storage.retention_rules import judge
from tests.unit.gateway.stack import Client, Stack, sample_body
from tests.unit.gateway.test_checkpoints import ask, events, expire, save_for_sampler
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save

pytestmark = pytest.mark.usefixtures("short_flushes")

NOW = 1_000_000.0


def checkpoint(step: int, *, age_s: float = 0.0, **facts: Any) -> Checkpoint:
    path = f"tinker://r/weights/{step}"
    return Checkpoint(path=path, step=step, created_at=NOW - age_s, **{"public": False, "pinned": False} | facts)


def kept(checkpoints: list[Checkpoint], *, in_use: tuple[str, ...] = (), **rules: int) -> list[int]:
    judged = judge(checkpoints, RetentionRules(**rules), in_use=in_use, now=NOW)
    return [one.checkpoint.step for one in judged if one.kept_as]


def test_without_a_rule_everything_is_kept() -> None:
    assert kept([checkpoint(step) for step in range(5)]) == [0, 1, 2, 3, 4]


def test_the_last_are_the_newest() -> None:
    rewound = [checkpoint(10, age_s=30), checkpoint(20, age_s=20), checkpoint(5, age_s=10)]
    assert kept(rewound, keep_last=2) == [20, 5]
    assert kept(rewound, keep_last=9) == [10, 20, 5]


def test_every_so_many_steps_the_first_is_kept_also_when_it_is_judged_again() -> None:
    checkpoints = [checkpoint(step, age_s=1000 - step) for step in (3, 5, 8, 10, 14, 21, 29, 30)]
    assert kept(checkpoints, keep_every_steps=10) == [3, 10, 21, 30]
    again = [one for one in checkpoints if one.step in (3, 10, 21, 30)]
    assert kept(again, keep_every_steps=10) == [3, 10, 21, 30]
    assert kept(checkpoints, keep_every_steps=1) == [one.step for one in checkpoints]


def test_a_checkpoint_that_one_rule_keeps_is_kept() -> None:
    checkpoints = [checkpoint(step, age_s=100 - step) for step in (1, 12, 13, 25, 26)]
    assert kept(checkpoints, keep_last=1, keep_every_steps=10) == [1, 12, 25, 26]
    assert kept(checkpoints, keep_within_seconds=80) == [25, 26]
    assert kept(checkpoints, keep_within_seconds=80, keep_every_steps=100) == [1, 25, 26]


def test_pinned_published_and_used_ones_are_kept_and_count_among_the_last() -> None:
    checkpoints = [
        checkpoint(1, age_s=5, pinned=True), checkpoint(2, age_s=4, public=True), checkpoint(3, age_s=3),
        checkpoint(4, age_s=2), checkpoint(5, age_s=1),
    ]  # fmt: skip
    assert kept(checkpoints, keep_last=1, in_use=("tinker://r/weights/3",)) == [1, 2, 3, 5]


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every_steps": -1}, {"keep_first": 3}])
def test_a_rule_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        GatewayConfig(retention=Policy.model_validate({"training": wrong}))


# Policies of a gateway


async def reap(stack: Stack) -> None:
    await stack.gateway.storage.retention.prune_all()


async def retention(client: Client, run_id: str, method: str = "GET", *, status: int = 200, **body: Any) -> Any:
    url = f"/api/v1/training_runs/{run_id}/retention"
    reply = await client.request(method, url, json=body if method == "PUT" else None)
    assert reply.status_code == status, reply.text
    return reply.json()


async def prune(client: Client, run_id: str, *, status: int = 200, **body: Any) -> Any:
    return await client.call(f"training_runs/{run_id}/retention/prune", body, status=status)


async def names(client: Client, run_id: str) -> list[str]:
    found = (await get(client, f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    return [one["checkpoint_id"].split("/")[1] for one in found]


def shown(checkpoints: list[dict[str, Any]]) -> list[str]:
    return [one["checkpoint_id"].split("/")[1] for one in checkpoints]


async def run_with(client: Client, *, number: int = 4) -> str:
    run_id = await client.model(await client.session())
    for n in range(1, number + 1):
        await save(client, run_id, n, path=f"n{n}")
    return run_id


def path_of(run_id: str, name: str, kind: str = "weights") -> str:
    return f"tinker://{run_id}/{kind}/{name}"


async def test_a_policy_says_what_it_would_delete_and_the_reaper_does_it(stack: Stack, client: Client) -> None:
    run_id = await run_with(client)
    await save_for_sampler(client, run_id, 5, "sampled")
    before = await retention(client, run_id)
    assert (before["is_default"], before["delete"]) == (True, [])
    assert {tuple(one["kept_as"]) for one in before["keep"]} == {("no_rules",)}
    dry = await retention(client, run_id, "PUT", training={"keep_last": 2})
    assert (dry["is_default"], dry["policy"]) == (False, {"training": {"keep_last": 2}, "sampler": {}})
    assert shown(dry["delete"]) == ["n1", "n2"]
    assert {one["checkpoint_id"]: one["kept_as"] for one in dry["keep"]} == {
        "weights/n3": ["last"], "weights/n4": ["last"], "sampler_weights/sampled": ["no_rules"]
    }  # fmt: skip
    assert await names(client, run_id) == ["n1", "n2", "n3", "n4", "sampled"]
    await reap(stack)
    assert await names(client, run_id) == ["n3", "n4", "sampled"]
    assert sorted(place.split("/")[2] for place in stack.trainer.checkpoints) == ["n3", "n4", "sampled"]
    assert (await events(client))[-2:] == ["checkpoint_prune"] * 2
    await retention(client, run_id, "DELETE")
    assert (await retention(client, run_id))["is_default"]
    text = (await client.get("/metrics")).text
    assert 'gateway_swept_checkpoints_total{reason="retention"} 2.0' in text


@pytest.mark.gateway(retention=Policy(training=RetentionRules(keep_last=1), sampler=RetentionRules(keep_last=1)))
async def test_the_default_is_for_runs_without_a_policy_of_their_own(stack: Stack, client: Client) -> None:
    mine, other = await run_with(client, number=2), await run_with(client, number=2)
    await retention(client, mine, "PUT")  # no rules: everything stays
    await reap(stack)
    assert await names(client, mine) == ["n1", "n2"]
    assert await names(client, other) == ["n2"]


async def test_pinned_published_and_sampled_ones_stay_whatever_the_policy(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    for n in range(1, 6):
        await save_for_sampler(client, run_id, n, f"n{n}")
    pinned, published, sampled = (path_of(run_id, f"n{n}", "sampler_weights") for n in (1, 2, 3))
    await ask(client, "POST", pinned, "pin")
    await ask(client, "POST", published, "publish")
    sampler_id = await client.sampling_session(session_id, model_path=sampled)
    plan = await retention(client, run_id, "PUT", sampler={"keep_last": 1})
    assert shown(plan["delete"]) == ["n4"]
    assert [one["kept_as"] for one in plan["keep"]] == [["pinned"], ["published"], ["in_use"], ["last"]]
    await reap(stack)
    assert await names(client, run_id) == ["n1", "n2", "n3", "n5"]
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))
    await ask(client, "DELETE", pinned, "pin")
    await ask(client, "DELETE", published, "publish")
    await client.call(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    await reap(stack)
    assert await names(client, run_id) == ["n5"]
    assert (await events(client)).count("checkpoint_prune") == 4


async def test_a_checkpoint_pinned_after_the_plan_stays(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await run_with(client)
    service = stack.gateway.storage.retention
    old = await service.plan(run_id, Policy(training=RetentionRules(keep_last=1)))
    await ask(client, "POST", path_of(run_id, "n1"), "pin")
    await ask(client, "POST", path_of(run_id, "n2"), "publish")

    async def stale(*_: Any) -> Any:
        return old

    monkeypatch.setattr(service, "plan", stale)
    assert [one.path for one in await service.prune(run_id, Policy())] == [path_of(run_id, "n3")]
    assert await service.prune(run_id, Policy()) == []  # another gateway, with the same plan
    assert await names(client, run_id) == ["n1", "n2", "n4"]


async def test_a_prune_on_demand_deletes_what_was_shown_and_nothing_else(stack: Stack, client: Client) -> None:
    run_id = await run_with(client)
    policy = {"training": {"keep_last": 1}}
    plan = await prune(client, run_id, policy=policy, dry_run=True)
    assert shown(plan["delete"]) == ["n1", "n2", "n3"]
    assert await names(client, run_id) == ["n1", "n2", "n3", "n4"]
    await save(client, run_id, 5, path="n5")  # now n4 is none of the last, but nobody was shown that
    paths = [one["tinker_path"] for one in plan["delete"]]
    done = await prune(client, run_id, policy=policy, paths=paths[:2])
    assert shown(done["deleted"]) == ["n1", "n2"]
    assert shown(done["delete"]) == ["n3", "n4"]
    assert await names(client, run_id) == ["n3", "n4", "n5"]
    assert (await prune(client, run_id))["deleted"] == []  # by the run's own policy, which is to keep all
    assert "keep_last" in (await prune(client, run_id, policy={"training": {"keep_last": 0}}, status=400))["detail"]
    await retention(client, run_id, "PUT", status=400, training={"keep_some": 1})
    for rule in ("keep_last", "keep_every_steps", "keep_within_seconds"):
        refused = await retention(client, run_id, "PUT", status=400, training={rule: 2**64})
        assert refused["detail"].startswith(f"training.{rule}: ")


async def test_foreign_and_unknown_runs_have_no_retention(stack: Stack, client: Client) -> None:
    run_id = await run_with(client, number=1)
    await stack.restart_gateway(api_keys=["tml-test", "tml-other"])
    for key, asked in (("tml-other", run_id), ("tml-test", "none:train:0")):
        async with Client(base_url=stack.url, headers={"x-api-key": key}) as other:
            for method in ("GET", "PUT", "DELETE"):
                assert "no training run" in (await retention(other, asked, method, status=404))["detail"]
            await prune(other, asked, status=404, policy={"training": {"keep_last": 1}})
            for method, action in (("GET", ""), ("GET", "verify"), ("POST", "pin"), ("DELETE", "pin")):
                await ask(other, method, path_of(asked, "n1"), action, status=404)


async def test_a_policy_does_its_work_while_the_trainer_is_away_and_the_files_go_later(
    stack: Stack, client: Client
) -> None:
    run_id = await run_with(client)
    await retention(client, run_id, "PUT", training={"keep_last": 1})
    await expire(stack, path_of(run_id, "n4"))
    await stack.trainer_backend.stop()
    await stack.gateway.reaper.delete_expired()
    await reap(stack)
    assert await names(client, run_id) == ["n3"]
    assert len(stack.trainer.checkpoints) == 4
    await stack.trainer_backend.start()
    await stack.gateway.clients.settle(stack.gateway.clients.of_each_store, timeout_s=20)
    async with asyncio.timeout(20):  # gRPC connects again after a pause
        while len(stack.trainer.checkpoints) > 1:
            await stack.gateway.reaper.delete_expired()
            await asyncio.sleep(0.05)
    assert [place.split("/")[2] for place in stack.trainer.checkpoints] == ["n3"]
    assert (await events(client))[-3:].count("checkpoint_prune") == 2
    text = (await client.get("/metrics")).text
    assert 'gateway_swept_checkpoints_total{reason="expired"} 1.0' in text


async def test_two_sweepers_at_once_record_each_checkpoint_once(stack: Stack, client: Client) -> None:
    run_id = await run_with(client)
    gateway = stack.gateway
    await expire(stack, path_of(run_id, "n1"))
    (expired,) = await gateway.store.checkpoints.expired()
    assert [await gateway.storage.checkpoints.expire(expired) for _ in range(2)] == [True, False]
    assert (await events(client)).count("checkpoint_expire") == 1


async def test_a_pinned_checkpoint_outlives_its_ttl_until_it_is_unpinned(stack: Stack, client: Client) -> None:
    run_id = await run_with(client, number=1)
    path = path_of(run_id, "n1")
    await ask(client, "POST", path, "pin")
    await expire(stack, path)
    await stack.gateway.reaper.delete_expired()
    assert await names(client, run_id) == ["n1"]
    assert (await ask(client, "GET", path))["pinned"] is True
    await ask(client, "DELETE", path, "pin")
    assert await names(client, run_id) == []
    await stack.gateway.reaper.delete_expired()
    assert stack.trainer.checkpoints == {}
    assert await stack.gateway.store.checkpoints.get(path) is None


async def test_an_explicit_deletion_counts_also_for_a_pinned_one(stack: Stack, client: Client) -> None:
    run_id = await run_with(client, number=1)
    path = path_of(run_id, "n1")
    await ask(client, "POST", path, "pin")
    await stack.trainer_backend.stop()
    await ask(client, "DELETE", path)
    assert await names(client, run_id) == []
    row = await stack.gateway.store.checkpoints.get(path)
    assert row is not None
    assert row.expires_at == DELETED_AT
    assert [one.path for one in await stack.gateway.store.checkpoints.expired()] == [path]


async def test_everything_about_a_checkpoint_and_whether_it_is_intact(stack: Stack, client: Client) -> None:
    run_id = await run_with(client, number=1)
    path = path_of(run_id, "n1")
    shown = await ask(client, "GET", path)
    assert (shown["tinker_path"], shown["base_model"], shown["lora_rank"]) == (path, "Qwen/Qwen3-8B", 8)
    assert shown["optimizer"] == "adamw"
    assert len(shown["files"]) == 3
    verified = await ask(client, "GET", path, "verify")
    assert verified["intact"]
    assert [file["problem"] for file in verified["files"]] == [None] * 3
    stack.trainer.damaged = {"optimizer.safetensors"}
    verified = await ask(client, "GET", path, "verify")
    assert not verified["intact"]
    problems = {file["name"]: file["problem"] for file in verified["files"] if file["problem"]}
    assert list(problems) == ["optimizer.safetensors"]
    assert "is damaged" in problems["optimizer.safetensors"]


async def test_stored_bytes_are_counted(stack: Stack, client: Client) -> None:
    await run_with(client, number=2)
    await stack.gateway.reaper.count_stored()
    text = (await client.get("/metrics")).text
    assert 'gateway_checkpoints{kind="weights"} 2.0' in text
    stored = sum(info.size_bytes for info in stack.trainer.checkpoints.values())
    assert f'gateway_checkpoint_bytes{{kind="weights"}} {float(stored)}' in text
    assert 'gateway_checkpoints{kind="sampler_weights"} 0.0' in text


async def test_a_run_that_does_not_exist_gets_no_policy(stack: Stack, client: Client) -> None:
    """Its row would stay for ever, and each made-up id would leave one."""
    session_id = await client.session()
    path = f"/api/v1/training_runs/{session_id}:train:7/retention"
    assert (await client.put(path, json={"training": {"keep_last": 3}})).status_code == 404
    assert (await client.get(path)).status_code == 404
    assert await stack.gateway.store.all(select(RetentionPolicy.run_id)) == []
