from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from tinker import types

from gateway.config import GatewayConfig
from gateway.database.tables.tenants import HourlyUsage
from gateway.tenants.billing import hours_between
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack, sample_body
from tests.unit.gateway.test_runs import get
from tests.unit.gateway.test_weights import save

pytestmark = pytest.mark.usefixtures("short_flushes")

PRICES = {"*": {"training": 2.0, "sampling_prefill": 1.0}, BASE_MODEL: {"training": 4.0, "sampling_sample": 3.0}}


async def usage(client: Client) -> types.BillingUsageResponse:
    """Usage of this hour and those around it."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = {"starting_on": hour - timedelta(hours=1), "ending_before": hour + timedelta(hours=2)}
    query = types.GetBillingUsageRequest.model_validate(window).model_dump(mode="json")
    return types.BillingUsageResponse.model_validate(await get(client, "billing/usage/events", **query))


@pytest.mark.gateway(token_prices_usd=PRICES)
async def test_tokens_and_checkpoints_are_counted_and_priced(client: Client) -> None:
    session_id = (await client.call("create_session", {"user_metadata": {"k": "v"}, "project_id": "p"}))["session_id"]
    run_id = await client.model(session_id)
    for seq_id in (1, 2):
        await client.result((await client.forward_backward(run_id, seq_id)).json())
    await client.result((await client.forward_backward(run_id, 3, loss_fn="none")).json())
    await save(client, run_id, 4)
    sampler_id = await client.sampling_session(session_id)
    await client.result(await client.call("asample", sample_body(sampler_id, 0)))

    found = await usage(client)
    counts: dict[str, Any] = {}
    for event in found.data:
        assert event.bucket_end - event.bucket_start == timedelta(hours=1)
        if event.event_info.type == "storage":
            continue
        assert (event.base_model, event.session_id, event.project_id) == (BASE_MODEL, session_id, "p")
        assert event.user_id == "tml:organization_user:local"
        counts[event.event_info.type] = event
    assert counts["training"].event_info.token_count == 6  # the one that failed does not count
    assert counts["training"].effective_rate_usd_per_million_tokens == 4.0
    assert counts["training"].estimated_cost_usd == pytest.approx(6 * 4.0 / 1e6)
    assert counts["sampling_prefill"].event_info.token_count == 3
    assert not counts["sampling_prefill"].event_info.cached
    assert counts["sampling_prefill"].effective_rate_usd_per_million_tokens == 1.0
    assert counts["sampling_sample"].event_info.token_count == 4
    assert counts["checkpoint"].event_info.count == 1
    assert counts["checkpoint"].estimated_cost_usd is None
    assert found.sessions[session_id].user_metadata == {"k": "v"}
    assert found.cost_data_through is None


async def test_nothing_costs_anything_unless_it_has_a_price(client: Client) -> None:
    run_id = await client.model(await client.session())
    await client.result((await client.forward_backward(run_id, 1)).json())
    (event,) = [event for event in (await usage(client)).data if event.event_info.type == "training"]
    assert (event.estimated_cost_usd, event.effective_rate_usd_per_million_tokens) == (0.0, 0.0)


@pytest.mark.gateway(storage_price_usd=0.5)
async def test_storage_is_counted_by_time_and_only_once(stack: Stack, client: Client) -> None:
    run_id = await client.model(await client.session())
    path = (await save(client, run_id, 1))["path"]
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    now = time.time()
    half_an_hour_ago = now - 1800
    await gateway.store.checkpoints.update(path, size_bytes=10**9, created_at=half_an_hour_ago)
    last = await gateway.store.settings.get("storage_metered_until", default=repr(now))
    await gateway.store.settings.swap("storage_metered_until", old=last, new=repr(now - 3600))
    for _ in range(2):
        await gateway.tenants.billing.meter_storage()
    events = [event for event in (await usage(client)).data if event.event_info.type == "storage"]
    stored = sum(event.event_info.gigabyte_hours for event in events if event.event_info.type == "storage")
    assert stored == pytest.approx(0.5, abs=0.01)
    assert sum(event.estimated_cost_usd or 0.0 for event in events) == pytest.approx(0.5 * stored / 720)
    assert all(event.session_id is None and event.base_model == BASE_MODEL for event in events)

    current = types.CurrentCheckpointStorageUsageResponse.model_validate(
        await get(client, "billing/usage/checkpoints/current")
    )
    (item,) = current.data
    assert current.effective_rate_usd_per_gigabyte_month == 0.5
    assert (item.checkpoint_count, item.size_bytes, item.size_gigabytes) == (1, 10**9, 1.0)
    assert (item.project_id, item.estimated_monthly_cost_usd) == ("default", 0.5)
    assert (await get(client, "billing/usage/checkpoints/current", project_id="other"))["data"] == []


def test_an_hour_boundary_splits_what_is_counted() -> None:
    assert list(hours_between(3500.0, 7300.0)) == [(0, 3500.0, 3600), (1, 3600, 7200), (2, 7200, 7300.0)]


async def test_usage_of_more_events_than_one_answer_holds_is_refused_by_name(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stack.server is not None
    monkeypatch.setattr("gateway.tenants.billing.MAX_EVENTS", 2)
    for hour in (10, 11, 12):
        stack.server.app.state.gateway.ledger.use("training", 1, base_model="m", owner="o", hour=hour)
    begin, path = "starting_on=1970-01-01T10:00:00Z", "billing/usage/events"
    refused = await client.get(f"/api/v1/{path}?{begin}&ending_before=1970-01-01T13:00:00Z")
    assert refused.status_code == 400
    assert "ending_before: the 3 hours have more than 2 events" in refused.json()["detail"]
    assert len((await get(client, f"{path}?{begin}&ending_before=1970-01-01T12:00:00Z"))["data"]) == 2


async def test_usage_of_other_hours_stays_out(stack: Stack, client: Client) -> None:
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    for hour in (10, 11, 12):
        gateway.ledger.use("training", hour, base_model="m", owner="o", hour=hour)
    await gateway.ledger.flush()
    gateway.ledger.use("training", 1, base_model="m", owner="o", hour=11)
    window = "starting_on=1970-01-01T11:00:00Z&ending_before=1970-01-01T12:00:00Z"
    (event,) = (await get(client, f"billing/usage/events?{window}"))["data"]
    assert event["event_info"] == {"type": "training", "token_count": 12}
    async with gateway.store.begin() as db:
        assert (await db.get_one(HourlyUsage, (10, "o", "", "m", "training"))).amount == 10


@pytest.mark.parametrize(
    ("start", "end", "part"),
    [
        ("2026-07-13T00:30:00Z", "2026-07-14T00:00:00Z", "starting_on"),
        ("2026-07-13T00:00:00Z", "2026-07-13T00:00:01Z", "ending_before"),
        ("2026-07-13T00:00:00Z", "2026-07-27T01:00:00Z", "ending_before"),
        ("2026-07-13T00:00:00Z", "2026-07-13T00:00:00Z", "ending_before"),
        ("2026-07-13T00:00:00", "2026-07-14T00:00:00Z", "starting_on"),
        ("2999-07-13T00:00:00Z", "2999-07-14T00:00:00Z", "starting_on"),
        ("", "2026-07-14T00:00:00Z", "starting_on"),
    ],
)
async def test_a_window_of_usage_that_makes_no_sense_is_refused_by_name(
    client: Client, start: str, end: str, part: str
) -> None:
    path = f"billing/usage/events?starting_on={start}&ending_before={end}"
    assert (await get(client, path, status=400))["detail"].startswith(part)


async def test_the_audit_log_says_who_did_what_to_which_checkpoint(client: Client) -> None:
    session_id = await client.session()
    run_id = await client.model(session_id)
    path = (await save(client, run_id, 1))["path"]
    await client.sampling_session(session_id, model_path=path)
    load = {"model_id": run_id, "seq_id": 2, "path": path, "optimizer": True}
    await client.result(await client.call("load_weights", load))
    log = types.AuditLogResponse.model_validate(await get(client, "audit", event_type="checkpoints"))
    assert [(entry.event, entry.purpose) for entry in log.entries] == [
        ("checkpoint_create", None),
        ("checkpoint_read", "sample"),
        ("checkpoint_read", "load"),
    ]
    for entry in log.entries:
        assert (entry.model_id, entry.tinker_path) == (run_id, path)
        assert entry.event_details["actor"] == "tml:organization_user:local"
        assert entry.event_details["tinker_path"] == path
    assert [entry.timestamp for entry in log.entries] == sorted(entry.timestamp for entry in log.entries)


async def test_the_audit_log_is_asked_by_type_and_day(client: Client) -> None:
    await save(client, await client.model(await client.session()), 1)
    today = datetime.now(UTC).date()
    assert len((await get(client, "audit", day=today.isoformat()))["entries"]) == 1
    assert (await get(client, "audit", day=(today - timedelta(days=1)).isoformat()))["entries"] == []
    assert (await get(client, "audit", event_type="teams"))["entries"] == []
    assert "event_type" in (await get(client, "audit", event_type="x", status=400))["detail"]
    assert "day" in (await get(client, "audit", day="yesterday", status=400))["detail"]
    assert (await get(client, "audit", day=date(1, 1, 1).isoformat()))["entries"] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"token_prices_usd": {"*": {"training": -1.0}}},
        {"token_prices_usd": {"*": {"other": 1.0}}},
        {"storage_price_usd": -1},
        {"public_url": "tinker.test"},
        {"download_url_s": 300},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        GatewayConfig(**settings)
