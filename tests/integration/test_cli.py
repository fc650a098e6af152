"""The `tinker` command line, each command in a process of its own, against the real stack.

`checkpoint push-hf` is `checkpoint download` and then an upload to the Hugging Face Hub, which no test can reach.
`auth whoami` needs JWTs: tests/unit/gateway/test_keys.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support import forking
from tests.support.examples import BASE_MODEL, PROMPT, batch, forward, new_model, sample, train
from tests.support.stack import Stack

Cli = Callable[..., str]


@pytest.fixture(scope="module")
def cli(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """Runs a command and returns what it prints; raises AssertionError unless its exit status is `status`."""
    env = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))}
    env |= {"TINKER_BASE_URL": stack.base_url, "TINKER_API_KEY": "tml-test"}

    def run(*arguments: str, status: int = 0) -> str:
        done = asyncio.run(forking.run(forking.command, "tinker.cli", arguments, env=env))
        assert done.status == status, f"{arguments}: {done.status}\n{done.output}"
        return done.output

    return run


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """With the checkpoints weights/kept, weights/other and sampler_weights/sampler."""
    client = new_model(service, rank=4, user_metadata={"k": "v"})
    train(client, batch(1), steps=3, adam=tinker.AdamParams(learning_rate=5e-3))
    saves = [client.save_state(name) for name in ("kept", "other")]
    path = client.save_weights_for_sampler("sampler").result().path
    for save in saves:
        save.result()
    sample(service.create_sampling_client(model_path=path).result(), PROMPT, max_tokens=4)
    return client


@pytest.fixture(scope="module")
def rest(stack: Stack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.base_url, api_key="tml-test")


def path_of(client: tinker.TrainingClient, checkpoint_id: str) -> str:
    return f"tinker://{client.model_id}/{checkpoint_id}"


def as_json(cli: Cli, *arguments: str) -> Any:
    return json.loads(cli("--format", "json", *arguments))


def in_parallel(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return [done.result() for done in [pool.submit(call) for call in calls]]


def test_what_there_is(cli: Cli, trained: tinker.TrainingClient) -> None:
    run_id, kept = trained.model_id, path_of(trained, "weights/kept")
    version, status, models, runs, run, checkpoints, of_run, checkpoint = in_parallel(
        lambda: cli("version"),
        lambda: cli("auth", "status"),
        lambda: cli("model", "list"),
        lambda: as_json(cli, "run", "list", "--limit", "0"),
        lambda: as_json(cli, "run", "info", run_id),
        lambda: as_json(cli, "checkpoint", "list", "--limit", "0"),
        lambda: cli("checkpoint", "list", "--run-id", run_id),
        lambda: as_json(cli, "checkpoint", "info", kept),
    )
    assert tinker.__version__ in version
    assert "Tinker accessible: yes" in status
    assert BASE_MODEL in models
    assert run_id in [one["training_run_id"] for one in runs["runs"]]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (run_id, BASE_MODEL, 4)
    assert run["user_metadata"] == {"k": "v"}
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/sampler"
    assert kept in [one["tinker_path"] for one in checkpoints["checkpoints"]]
    assert "3 checkpoints" in of_run
    assert (checkpoint["tinker_path"], checkpoint["lora_rank"], checkpoint["expires_at"]) == (kept, 4, None)


def test_changes_to_a_checkpoint(
    cli: Cli, trained: tinker.TrainingClient, rest: tinker.RestClient, stack: Stack
) -> None:
    path = path_of(trained, "weights/other")

    def now() -> tinker.types.Checkpoint:
        found = rest.list_checkpoints(trained.model_id).result().checkpoints
        return next(one for one in found if one.tinker_path == path)

    cli("checkpoint", "publish", path)
    assert now().public
    cli("checkpoint", "unpublish", path)
    assert not now().public
    cli("checkpoint", "set-ttl", path, "--ttl", "7200")
    expires_at = now().expires_at
    assert expires_at is not None
    assert timedelta(minutes=110) < expires_at - datetime.now(UTC) <= timedelta(hours=2)
    cli("checkpoint", "set-ttl", path, "--remove")
    assert now().expires_at is None
    folder = stack.checkpoints / path.removeprefix("tinker://")
    assert folder.is_dir()
    assert "Deleted 1" in cli("checkpoint", "delete", path, "--yes")
    assert not folder.exists()
    assert path in cli("checkpoint", "info", path, status=1)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft: it is about merging
def name_the_tied_head_as_peft_does(folder: Path) -> None:
    """The command downloads external weights (docs/checkpoints.md)."""
    tensors = load_file(folder / "adapter_model.safetensors")
    assert any("model.unembed_tokens" in name for name in tensors)
    renamed = {name.replace("model.unembed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = sorted({name.split(".")[-3] for name in renamed})
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_a_downloaded_checkpoint_is_a_folder_of_peft(
    cli: Cli, trained: tinker.TrainingClient, rest: tinker.RestClient, toy: Path, tmp_path: Path
) -> None:
    run_id = trained.model_id
    external = trained.save_weights_external("files").result().path
    in_parallel(
        lambda: cli("checkpoint", "download", path_of(trained, "weights/kept"), "--output", str(tmp_path)),
        lambda: cli("checkpoint", "download", external, "--output", str(tmp_path)),
    )
    wanted = forward(trained, PROMPT)[0]
    for name in ("weights_kept", "external_weights_files"):
        folder = tmp_path / f"{run_id}_{name}"
        assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        name_the_tied_head_as_peft_does(folder)
        model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
        with warnings.catch_warnings(action="ignore"):  # PEFT speaks of the tied head
            model = peft.PeftModel.from_pretrained(model, folder)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT])).logits[0, :-1]
        found = logits.log_softmax(-1)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-4)
    # The command has deleted the checkpoint that it made for the download, and ended the run's session.
    newest = rest.list_training_runs(limit=1).result().training_runs[0]
    assert newest.user_metadata == {"created_by": "tinker checkpoint download"}
    assert rest.list_checkpoints(newest.training_run_id).result().checkpoints == []


def test_the_timeline_of_a_session(cli: Cli, trained: tinker.TrainingClient, tmp_path: Path) -> None:
    run_id = trained.model_id
    session_id = run_id.split(":")[0]
    file = tmp_path / "trace.pftrace"
    cli("session", "export-trace", session_id, "--output", str(file))
    events = json.loads(file.read_bytes())["traceEvents"]
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    requests = [one for one in events if one["ph"] == "X" and one["cat"] == "request"]
    of_run = [one for one in requests if one["args"]["request_id"].startswith(f"{run_id}:")]
    assert {threads[one["pid"], one["tid"]].split(" ")[0] for one in of_run} == {run_id}
    names = [one["name"] for one in of_run]
    for name, count in (("create_model", 1), ("forward_backward", 3), ("optim_step", 3), ("save_weights", 2)):
        assert names.count(name) >= count
    assert any(":sample:" in one["args"]["request_id"] for one in requests)
    inner = [one for one in events if one["ph"] == "X" and one["cat"] == "compute"]
    outer = {one["args"]["request_id"]: one for one in requests}
    assert {"forward_backward", "asample"} <= {outer[one["args"]["request_id"]]["name"] for one in inner}
    for one in inner:
        around = outer[one["args"]["request_id"]]
        assert around["ts"] <= one["ts"]
        assert one["ts"] + one["dur"] <= around["ts"] + around["dur"] + 1  # rounding to a microsecond


def test_what_was_used(cli: Cli, trained: tinker.TrainingClient) -> None:
    session_id = trained.model_id.split(":")[0]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (hour - timedelta(hours=1), hour + timedelta(hours=1))]
    usage, storage = in_parallel(
        lambda: as_json(cli, "billing", "usage", *window), lambda: as_json(cli, "billing", "checkpoint-storage")
    )
    mine = [row for row in usage["data"] if row["session_id"] == session_id]
    kinds = {row["event_info"]["type"] for row in mine}
    assert kinds >= {"training", "sampling_prefill", "sampling_sample", "checkpoint"}
    assert all(row["estimated_cost_usd"] in (0.0, None) for row in mine)
    assert session_id in usage["sessions"]
    assert sum(item["checkpoint_count"] for item in storage["data"]) >= 2  # an item for each project
    assert storage["data"][0]["size_bytes"] > 0
