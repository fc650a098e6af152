"""Saving, loading, and what is listed of it."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np

from tests.conformance.kit import case
from tests.conformance.world import NEAR, TEXTS, World, assert_close, logprobs, need, raises, scores, settle


def _assert_same_model(world: World, model: Any, twin: Any) -> None:
    for found, wanted in zip(logprobs(world.forward(model)), logprobs(world.forward(twin)), strict=True):
        assert_close(found, wanted, "logprobs", within=5e-3)


def _assert_same_step(world: World, model: Any, twin: Any) -> None:
    """Equal weights and equal optimizers take equal steps."""
    world.step(model)
    world.step(twin)
    _assert_same_model(world, model, twin)


def _pair(world: World, name: str) -> tuple[Any, str]:
    """A model that has trained, and the path of its state."""
    model = world.model()
    world.step(model)
    world.step(model)
    return model, settle(model.save_state(name)).path


@case("save_state, load_state")
def load_state(world: World) -> None:
    model = world.model(seed=9)
    settle(model.load_state(world.saved_state))
    _assert_same_model(world, model, world.trained)


@case("save_state, load_state_with_optimizer")
def load_state_with_optimizer(world: World) -> None:
    original, path = _pair(world, "with-optimizer")
    model = world.model(seed=9)
    settle(need(model, "load_state_with_optimizer")(path))
    _assert_same_step(world, model, original)


@case("save_state again under a name: refused unless overwrite")
def overwrite(world: World) -> None:
    model = world.model()
    need(model, "save_state", "overwrite")
    path = settle(model.save_state("twice")).path
    raises(Exception, lambda: settle(model.save_state("twice")), "the same name again")
    world.step(model)
    assert settle(model.save_state("twice", overwrite=True)).path == path
    copy = world.model(seed=9)
    settle(copy.load_state(path))
    _assert_same_model(world, copy, model)


@case("new model from a state")
def create_from_state(world: World) -> None:
    model = settle(world.service.create_training_client_from_state(world.saved_state))
    _assert_same_model(world, model, world.trained)


@case("new model from a state, with its optimizer")
def create_from_state_with_optimizer(world: World) -> None:
    create = need(world.service, "create_training_client_from_state_with_optimizer")
    original, path = _pair(world, "to-resume")
    _assert_same_step(world, settle(create(path)), original)


@case("sampler weights with a name")
def named_sampler(world: World) -> None:
    assert "/sampler_weights/" in world.saved_sampler, world.saved_sampler
    for found, text in zip(logprobs(world.forward(world.trained)), TEXTS, strict=True):
        assert_close(scores(world.sampler, text), found, "logprobs", within=NEAR)
        assert np.abs(found - scores(world.base_sampler, text)).max() > NEAR, "these are the base model's"


@case("sampler weights without a name")
def ephemeral_sampler(world: World) -> None:
    sampler = settle(world.trained.save_weights_and_get_sampling_client())
    text = TEXTS[1]
    assert_close(scores(sampler, text), logprobs(world.forward(world.trained))[1], "logprobs", within=NEAR)


@case("sampler weights keep what they were while the model trains on")
def versions(world: World) -> None:
    model = world.model()
    path = settle(model.save_weights_for_sampler("before")).path
    before = logprobs(world.forward(model))[0]
    world.step(model)
    sampler = settle(world.service.create_sampling_client(model_path=path))
    assert_close(scores(sampler, TEXTS[0]), before, "logprobs", within=NEAR)


def _run_id(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def _checkpoint_id(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[2]


def _listed(world: World, path: str) -> Any:
    """The entry of the checkpoint; None when it is not listed."""
    found = settle(world.rest.list_checkpoints(_run_id(path))).checkpoints
    return next((one for one in found if one.checkpoint_id == _checkpoint_id(path)), None)


@case("list the runs, describe a run")
def runs(world: World) -> None:
    run_id = _run_id(world.saved_state)
    listed = settle(world.rest.list_training_runs(limit=100))
    assert run_id in [run.training_run_id for run in listed.training_runs], "the run is not listed"
    run = settle(world.rest.get_training_run(run_id))
    assert (run.base_model, run.is_lora, run.lora_rank) == (world.base_model, True, 8), run
    assert settle(world.rest.get_training_run_by_tinker_path(world.saved_state)).training_run_id == run_id


@case("list the checkpoints of a run")
def run_checkpoints(world: World) -> None:
    state, sampler = _listed(world, world.saved_state), _listed(world, world.saved_sampler)
    assert (state.checkpoint_type, sampler.checkpoint_type) == ("training", "sampler"), (state, sampler)
    assert abs(datetime.now(UTC) - state.time) < timedelta(days=1), state.time
    assert getattr(state, "tinker_path", world.saved_state) == world.saved_state, state


@case("list the user's checkpoints")
def user_checkpoints(world: World) -> None:
    found = settle(need(world.rest, "list_user_checkpoints")(limit=1000)).checkpoints
    assert world.saved_state in [one.tinker_path for one in found], "the checkpoint is not listed"


@case("weights_info")
def weights_info(world: World) -> None:
    info = settle(need(world.rest, "get_weights_info_by_tinker_path")(world.saved_state))
    assert (info.base_model, info.is_lora, info.lora_rank) == (world.base_model, True, 8), info


@case("publish and unpublish a checkpoint")
def publish(world: World) -> None:
    path = settle(world.trained.save_state("to-publish")).path
    settle(need(world.rest, "publish_checkpoint_from_tinker_path")(path))
    assert _listed(world, path).public is True, "not public"
    settle(world.rest.unpublish_checkpoint_from_tinker_path(path))
    assert _listed(world, path).public is False, "still public"


@case("set and remove a checkpoint's time to live")
def ttl(world: World) -> None:
    set_ttl = need(world.rest, "set_checkpoint_ttl_from_tinker_path")
    path = settle(world.trained.save_state("to-expire")).path
    settle(set_ttl(path, 7200))
    left = _listed(world, path).expires_at - datetime.now(UTC)
    assert timedelta(minutes=110) < left <= timedelta(minutes=120), left
    settle(set_ttl(path, None))
    assert _listed(world, path).expires_at is None, "it still expires"


@case("save with a time to live")
def save_with_ttl(world: World) -> None:
    need(world.trained, "save_state", "ttl_seconds")
    path = settle(world.trained.save_state("for-two-hours", ttl_seconds=7200)).path
    expires_at = getattr(_listed(world, path), "expires_at", None)
    assert expires_at is not None, "it does not expire"
    assert timedelta(minutes=110) < expires_at - datetime.now(UTC) <= timedelta(minutes=120), expires_at


@case("delete a checkpoint")
def delete(world: World) -> None:
    path = settle(world.trained.save_state("to-delete")).path
    assert _listed(world, path) is not None
    settle(world.rest.delete_checkpoint_from_tinker_path(path))
    assert _listed(world, path) is None, "still listed"
    raises(Exception, lambda: settle(world.model().load_state(path)), "loading what was deleted")


@case("copy a checkpoint")
def copy(world: World) -> None:
    need(world.service, "copy_weights")
    path = settle(world.new_service(project_id="conformance").copy_weights(world.saved_state))
    path = getattr(path, "tinker_path", path)
    assert path != world.saved_state, path
    model = settle(world.service.create_training_client_from_state(path))
    _assert_same_model(world, model, world.trained)


def _download(url: str) -> bytes:
    """Without a key."""
    return httpx.get(url, timeout=30).raise_for_status().content


def _assert_peft_config(content: bytes) -> None:
    config = json.loads(content)
    assert (config["peft_type"], config["r"]) == ("LORA", 8), config


@case("download a checkpoint as an archive")
def archive(world: World) -> None:
    get_url = need(world.rest, "get_checkpoint_archive_url_from_tinker_path")
    answer = settle(get_url(world.saved_sampler))
    expires = answer.expires if answer.expires.tzinfo else answer.expires.replace(tzinfo=UTC)
    assert expires > datetime.now(UTC), answer
    with tarfile.open(fileobj=io.BytesIO(_download(answer.url))) as files:
        names = {name.rpartition("/")[2]: name for name in files.getnames()}
        assert "adapter_model.safetensors" in names, names
        config = files.extractfile(names["adapter_config.json"])
        assert config is not None
        _assert_peft_config(config.read())


@case("download a checkpoint's files: save_weights_external")
def external(world: World) -> None:
    saved = settle(need(world.trained, "save_weights_external")("external"))
    urls = settle(world.rest.get_external_weights_urls(saved.path))
    assert urls.expires > datetime.now(UTC), urls
    files = {name.rpartition("/")[2]: url for name, url in urls.urls.items()}
    assert "adapter_model.safetensors" in files, files
    _assert_peft_config(_download(files["adapter_config.json"]))
