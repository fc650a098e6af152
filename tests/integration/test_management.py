"""Runs, checkpoints, sessions and administration through the SDK, against real processes and files."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyrage
import pytest
import safetensors.torch
import tinker
from tinker import types

from tests.support.examples import BASE_MODEL, PROMPT, batch, forward, new_model, sample, score, train
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tests.support.wire import Wire
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, weight_sync_pb2, weight_sync_pb2_grpc

age: Any = pyrage  # it comes without types

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED", "ignore::tinker.lib.experimental.ExperimentalWarning")


@pytest.fixture(scope="module")
def rest(stack: Stack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.base_url, api_key="tml-test")


@pytest.fixture(scope="module")
def admin(stack: Stack) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=stack.base_url, api_key="tml-test")


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = new_model(service, rank=4, user_metadata={"k": "v"})
    train(client, batch(2), steps=3, adam=tinker.AdamParams(learning_rate=5e-3))
    return client


def folder(stack: Stack, path: str) -> Path:
    return stack.checkpoints / path.removeprefix("tinker://")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        content = response.read()
        assert int(response.headers.get("Content-Length", len(content))) == len(content)
        return content


def evict(stack: Stack, version_id: str) -> None:
    """As a sampler does by itself when its memory is full."""
    with grpc.insecure_channel(stack.samplers[0]) as channel:
        weights = weight_sync_pb2_grpc.WeightSyncServiceStub(channel)
        weights.RemoveVersion(weight_sync_pb2.RemoveVersionRequest(version_id=version_id))
        stub = sampler_pb2_grpc.SamplerServiceStub(channel)
        assert version_id not in str(stub.ListVersions(sampler_pb2.ListVersionsRequest()))


def close_session(stack: Stack) -> None:
    """The end of any session wakes the reaper."""
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        service.create_sampling_client(base_model=stack.models[0]).result()


def test_runs_and_checkpoints_are_listed(rest: tinker.RestClient, trained: tinker.TrainingClient) -> None:
    saved = trained.save_state("listed", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    run = rest.get_training_run(trained.model_id).result()
    assert rest.get_training_run_by_tinker_path(saved).result() == run
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == saved
    assert (run.lora_rank, run.user_metadata, run.corrupted) == (4, {"k": "v"}, False)
    assert datetime.now(UTC) - run.last_request_time < timedelta(minutes=5)
    listed = rest.list_training_runs(limit=1000, access_scope="accessible").result()
    assert run.training_run_id in [one.training_run_id for one in listed.training_runs]
    assert listed.cursor.total_count == len(listed.training_runs)
    (checkpoint,) = [
        one for one in rest.list_checkpoints(trained.model_id).result().checkpoints if one.tinker_path == saved
    ]
    assert (checkpoint.user_metadata, checkpoint.public) == ({"a": "b"}, False)
    assert checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints
    info = rest.get_weights_info_by_tinker_path(saved).result()
    assert (info.lora_rank, info.optimizer_config.type) == (4, "adamw")


def test_a_deleted_checkpoint_frees_its_disk_and_its_name(
    stack: Stack, rest: tinker.RestClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_state("gone").result().path
    assert folder(stack, path).is_dir()
    rest.delete_checkpoint(trained.model_id, "weights/gone").result()
    assert not folder(stack, path).exists()
    with pytest.raises(tinker.NotFoundError, match="gone"):
        rest.get_weights_info_by_tinker_path(path).result()
    assert trained.save_state("gone").result().path == path
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        trained.save_state("gone").result()


def test_an_expired_checkpoint_frees_its_disk(
    stack: Stack, rest: tinker.RestClient, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_state("expires", ttl_seconds=3600).result().path
    database = sqlite3.connect(stack.state_dir / "gateway" / "gateway.db", timeout=30)
    with database:
        database.execute("update checkpoints set expires_at = ? where path = ?", (time.time() - 1, path))
    database.close()
    assert path not in [one.tinker_path for one in rest.list_checkpoints(trained.model_id).result().checkpoints]
    with pytest.raises(tinker.RequestFailedError, match="expired"):
        service.create_training_client_from_state(path).result()
    close_session(stack)
    wait_until(lambda: not folder(stack, path).exists(), what="the reaper deleted the folder")


def test_a_sampler_in_use_goes_on_without_its_checkpoint(
    stack: Stack, rest: tinker.RestClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_weights_for_sampler("in-use").result().path
    retired = stack.checkpoints / "retired" / "ephemeral"
    before = set(retired.glob("*"))
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        sampler = service.create_sampling_client(model_path=path).result()
        wanted = score(sampler, PROMPT)
        version_id = json.loads((folder(stack, path) / "manifest.json").read_text())["checkpoint"]["version_id"]
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert not folder(stack, path).exists()
        evict(stack, version_id)
        np.testing.assert_allclose(score(sampler, PROMPT), wanted, atol=1e-5)
        with pytest.raises(tinker.NotFoundError):
            service.create_sampling_client(model_path=path).result()
        assert len(set(retired.glob("*")) - before) == 1
    wait_until(lambda: set(retired.glob("*")) == before, what="the reaper emptied the folder")


def test_a_checkpoint_is_published_and_gets_another_ttl(
    rest: tinker.RestClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_state("changes").result().path

    def now() -> types.Checkpoint:
        found = rest.list_checkpoints(trained.model_id).result().checkpoints
        return next(one for one in found if one.tinker_path == path)

    for _ in range(2):
        rest.publish_checkpoint_from_tinker_path(path).result()
        assert now().public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not now().public
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    expires_at = now().expires_at
    assert expires_at is not None
    assert timedelta(minutes=110) < expires_at - datetime.now(UTC) <= timedelta(hours=2)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert now().expires_at is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds: 60"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()


def test_encrypted_files_open_for_their_recipient_alone(
    rest: tinker.RestClient, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    key = age.x25519.Identity.generate()
    plain = trained.save_weights_external("plain").result().path
    secret = trained.save_weights_external("secret", age_encryption_recipients=[str(key.to_public())]).result().path
    plain_urls, secret_urls = (rest.get_external_weights_urls(path).result() for path in (plain, secret))
    assert plain_urls.expires - datetime.now(UTC) > timedelta(minutes=30)
    assert set(plain_urls.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert set(secret_urls.urls) == {f"{name}.age" for name in plain_urls.urls}
    wanted = safetensors.torch.load(fetch(plain_urls.urls["adapter_model.safetensors"]))
    encrypted = fetch(secret_urls.urls["adapter_model.safetensors.age"])
    found = safetensors.torch.load(age.decrypt(encrypted, [key]))
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)
    with pytest.raises(age.DecryptError):
        age.decrypt(encrypted, [age.x25519.Identity.generate()])
    with pytest.raises(tinker.RequestFailedError, match="made for download"):
        service.create_training_client_from_state(secret).result()
    with pytest.raises(tinker.RequestFailedError, match="age"):
        trained.save_weights_external("bad", age_encryption_recipients=["nobody"]).result()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetch(secret_urls.urls["adapter_model.safetensors.age"].replace("secret", "plain"))


def test_an_archive_for_old_sdks_holds_the_adapter(wire: Wire, trained: tinker.TrainingClient) -> None:
    trained.save_state("archived").result()
    reply = wire.http.get(f"training_runs/{trained.model_id}/checkpoints/weights/archived/archive").json()
    with tarfile.open(fileobj=io.BytesIO(fetch(reply["url"]))) as archive:
        assert sorted(archive.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
        weights = archive.extractfile("adapter_model.safetensors")
        assert weights is not None
        assert safetensors.torch.load(weights.read())


@pytest.mark.parametrize(
    ("kind", "head"), [("sampler_weights", "lm_head"), ("external_weights", "model.unembed_tokens")]
)
def test_an_archive_for_old_sdks_has_the_names_of_its_kind(
    kind: str, head: str, wire: Wire, trained: tinker.TrainingClient
) -> None:
    """The stack's base model has one matrix for its embedding and its output layer, which the hosted service calls
    unembed_tokens, and stock PEFT lm_head."""
    save = trained.save_weights_external if kind == "external_weights" else trained.save_weights_for_sampler
    save("named").result()
    reply = wire.http.get(f"training_runs/{trained.model_id}/checkpoints/{kind}/named/archive").json()
    with tarfile.open(fileobj=io.BytesIO(fetch(reply["url"]))) as archive:
        weights = archive.extractfile("adapter_model.safetensors")
        assert weights is not None
        names = safetensors.torch.load(weights.read())
    heads = {name for name in names if ".layers." not in name}
    assert heads == {f"base_model.model.{head}.lora_{side}.weight" for side in "AB"}


def test_a_copy_outlives_its_source_and_shares_its_bytes(
    stack: Stack, rest: tinker.RestClient, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    source = trained.save_state("source").result().path
    wanted = forward(trained, PROMPT)[0]
    copy = rest.copy_weights(source, "archive-project", ttl_seconds=7200).result()
    name = "adapter_model.safetensors"
    assert (folder(stack, copy) / name).samefile(folder(stack, source) / name)
    rest.delete_checkpoint_from_tinker_path(source).result()
    revived = service.create_training_client_from_state_with_optimizer(copy).result()
    np.testing.assert_allclose(forward(revived, PROMPT)[0], wanted, atol=1e-5)
    (run,) = rest.list_training_runs(project_id="archive-project").result().training_runs
    assert copy.startswith(f"tinker://{run.training_run_id}/weights/source")
    with pytest.raises(tinker.BadRequestError, match="Access-Token"):
        rest.copy_weights(copy, "archive-project", weights_access_token="t").result()


def test_sessions_are_listed_searched_and_moved(stack: Stack, rest: tinker.RestClient) -> None:
    with tinker.ServiceClient(
        base_url=stack.base_url,
        api_key="tml-test",
        display_name="Nightly Search",
        project_id="first",
        user_metadata={"purpose": "search"},
    ) as service:
        client = new_model(service, rank=2)
        session_id = client.model_id.split(":")[0]
        sampler = service.create_sampling_client(base_model=stack.models[0]).result()
        sample(sampler, PROMPT, max_tokens=2)
        assert session_id in rest.list_sessions(limit=100).result().sessions
        found = rest.get_session(session_id).result()
        assert found.training_run_ids == [client.model_id]
        assert len(found.sampler_ids) == 1
        assert (found.display_name, found.user_metadata) == ("Nightly Search", {"purpose": "search"})
        assert rest.get_sampler(found.sampler_ids[0]).result().base_model == stack.models[0]
        rest.assign_session_project(session_id, "second").result()
        client.save_state("counted").result()
    request = types.SessionSearchRequest(display_name="search nightly", user_metadata={"purpose": "search"})
    (session,) = rest.search_sessions(request).result().sessions
    assert (session.session_id, session.project_id, session.checkpoints_count) == (session_id, "second", 1)
    assert session.status is not None
    assert session.status.type == "client_finished"
    events = json.loads(fetch(rest.export_session_trace(session_id).result()))["traceEvents"]
    assert {"create_model", "save_weights", "asample"} <= {event["name"] for event in events}


def test_the_audit_log_usage_and_storage_tell_of_a_run(
    rest: tinker.RestClient, admin: tinker.AdminClient, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    path = trained.save_weights_for_sampler("audited").result().path
    sampled = sample(service.create_sampling_client(model_path=path).result(), PROMPT, num_samples=2, max_tokens=5)
    assert sum(len(sequence.tokens) for sequence in sampled) == 10
    rest.delete_checkpoint_from_tinker_path(path).result()
    log = [entry for entry in admin.get_audit_log("checkpoints").result().entries if entry.tinker_path == path]
    assert [entry.event for entry in log] == ["checkpoint_create", "checkpoint_read", "checkpoint_delete"]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = admin.get_billing_usage(hour - timedelta(hours=1), hour + timedelta(hours=1)).result()
    session_id = trained.model_id.split(":")[0]
    counts: dict[str, int] = {}
    for event in usage.data:
        info = event.event_info
        if event.session_id == session_id and not isinstance(
            info, types.StorageBillingEvent | types.CheckpointBillingEvent
        ):
            counts[info.type] = counts.get(info.type, 0) + info.token_count
    assert counts["training"] >= 3 * sum(len(one.model_input.to_ints()) for one in batch(2))
    assert counts["sampling_prefill"] >= len(PROMPT)
    assert counts["sampling_sample"] >= 10
    with pytest.raises(tinker.BadRequestError, match="starting_on"):
        admin.get_billing_usage(hour + timedelta(minutes=1), hour + timedelta(hours=1)).result()
    stored = admin.get_current_checkpoint_storage_usage().result()
    assert sum(item.checkpoint_count for item in stored.data) >= 1
    assert stored.effective_rate_usd_per_gigabyte_month == 0.0


async def test_every_async_twin_does_the_same(
    rest: tinker.RestClient, admin: tinker.AdminClient, trained: tinker.TrainingClient
) -> None:
    run_id = trained.model_id
    session_id = run_id.split(":")[0]
    saved = (await trained.save_state("twin")).path
    external = (await trained.save_weights_external("twin")).path
    assert (await rest.get_training_run_async(run_id)).training_run_id == run_id
    assert (await rest.get_training_run_by_tinker_path_async(saved)).training_run_id == run_id
    assert (await rest.list_training_runs_async(limit=1)).cursor.limit == 1
    assert (await rest.list_checkpoints_async(run_id)).checkpoints
    assert (await rest.list_user_checkpoints_async(limit=1)).checkpoints
    assert (await rest.get_external_weights_urls_async(external)).urls
    await rest.publish_checkpoint_from_tinker_path_async(saved)
    await rest.unpublish_checkpoint_from_tinker_path_async(saved)
    await rest.set_checkpoint_ttl_from_tinker_path_async(saved, 3600)
    copy = await rest.copy_weights_async(saved, "twins")
    await rest.delete_checkpoint_async(run_id, "weights/twin")
    await rest.delete_checkpoint_from_tinker_path_async(copy)
    assert run_id in (await rest.get_session_async(session_id)).training_run_ids
    assert (await rest.list_sessions_async(limit=1)).sessions
    sampler = await trained.create_sampling_client((await trained.save_weights_for_sampler("twin")).path)
    assert (await rest.get_sampler_async(sampler._sampling_session_id)).base_model == BASE_MODEL
    await rest.assign_session_project_async(session_id, "twins")
    assert (await rest.export_session_trace_async(session_id)).startswith("http")
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for client in (rest, admin):
        assert (await client.get_audit_log_async(day=hour.date())).entries
        assert (await client.get_billing_usage_async(hour, hour + timedelta(hours=1))).data
        assert (await client.get_current_checkpoint_storage_usage_async()).data
