"""Stored checkpoints, against the real stack: damage is found wherever a checkpoint is read, and named; the command
line lists, verifies, exports and prunes."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import ModelInput

from tests.integration.test_import_export import TOKENS, peft_logprobs
from tests.support.examples import PROMPT, batch, forward, new_model, train
from tests.support.stack import Stack
from tinsmith_cli import main
from tinsmith_cli.ports import free_ports

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
FILES = (*ADAPTER, "optimizer.safetensors")


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    client = new_model(service, rank=4)
    train(client, batch(2), steps=2, adam=tinker.AdamParams(learning_rate=5e-3))
    return client


@pytest.fixture(scope="module")
def saved(trained: tinker.TrainingClient) -> str:
    return trained.save_state("stored").result().path


@contextmanager
def flipped(stack: Stack, path: str, name: str) -> Iterator[None]:
    """One bit of a file, as long as the block runs."""
    file = stack.checkpoints / path.removeprefix("tinker://") / name
    data = file.read_bytes()
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    file.write_bytes(changed)
    try:
        yield
    finally:
        file.write_bytes(data)


def run(stack: Stack, *arguments: object) -> int:
    keys = ("--base-url", stack.base_url, "--api-key", "tml-test")
    return main(["checkpoints", *map(str, arguments), *keys])


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_flipped_byte_is_named_when_a_run_resumes_from_it(
    stack: Stack, service: tinker.ServiceClient, saved: str, name: str
) -> None:
    with flipped(stack, saved, name), pytest.raises(tinker.TinkerError, match=f"weights/stored/{name} is damaged"):
        service.create_training_client_from_state_with_optimizer(saved).result()
    service.create_training_client_from_state_with_optimizer(saved).result()


@pytest.mark.parametrize("name", [*ADAPTER, "manifest.json"])
def test_a_flipped_byte_is_named_when_a_sampler_needs_it(
    stack: Stack, service: tinker.ServiceClient, trained: tinker.TrainingClient, name: str
) -> None:
    path = trained.save_state(f"sampled-{name.split('.')[0]}").result().path  # samplers do not have it yet
    sampler = service.create_sampling_client(model_path=path).result()
    params = tinker.SamplingParams(max_tokens=2)
    with flipped(stack, path, name), pytest.raises(tinker.TinkerError, match=f"{name} is damaged"):
        sampler.sample(ModelInput.from_ints(PROMPT), 1, params).result()
    sampler.sample(ModelInput.from_ints(PROMPT), 1, params).result()


@pytest.mark.parametrize("name", ADAPTER)
@pytest.mark.parametrize("out", ["folder", "one.tar"])
def test_a_flipped_byte_is_named_by_a_download_and_nothing_is_written(
    stack: Stack, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, out: str
) -> None:
    with flipped(stack, saved, name):
        assert run(stack, "export", saved, tmp_path / out) == 2
    assert f"weights/stored/{name} is damaged" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verify_reads_all_of_a_checkpoint_and_names_what_is_damaged(
    stack: Stack, saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stack, "verify", saved) == 0
    assert "intact, 3 files" in capsys.readouterr().out
    for name in (*FILES, "manifest.json"):
        with flipped(stack, saved, name):
            assert run(stack, "verify", saved) == 1
            shown = capsys.readouterr().out
            assert "DAMAGED" in shown
            assert f"weights/stored/{name} is damaged" in shown
    with flipped(stack, saved, FILES[0]):
        assert run(stack, "verify", saved, "--json") == 1
    (answer,) = json.loads(capsys.readouterr().out)
    assert [file["name"] for file in answer["files"] if file["problem"]] == [FILES[0]]
    folder = stack.checkpoints / saved.removeprefix("tinker://")
    folder.rename(folder.with_name("elsewhere"))
    try:
        assert run(stack, "verify", saved) == 1
    finally:
        folder.with_name("elsewhere").rename(folder)
    assert "DAMAGED" in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_verified_is_not_called_damaged(
    stack: Stack, saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stack, "verify", f"{saved}-unknown") == 2
    assert main(["checkpoints", "verify", saved, "--base-url", f"http://127.0.0.1:{free_ports(1)[0]}"]) == 2
    assert "DAMAGED" not in capsys.readouterr().out


def test_an_exported_folder_is_what_peft_loads_and_an_archive_holds_the_same(
    stack: Stack, trained: tinker.TrainingClient, saved: str, toy: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(stack, "export", saved, tmp_path / "folder") == 0
    assert "every SHA-256 matches" in capsys.readouterr().out
    np.testing.assert_allclose(peft_logprobs(toy, tmp_path / "folder"), forward(trained, TOKENS)[0], atol=1e-4)
    assert run(stack, "export", saved, tmp_path / "one.tar", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    with tarfile.open(tmp_path / "one.tar") as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    assert shown["sha256"] == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one.tar"]
    assert run(stack, "export", saved, tmp_path / "folder") == 2
    assert "exists" in capsys.readouterr().err


def test_lists_and_details(stack: Stack, saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = saved.removeprefix("tinker://").split("/")[0]
    for arguments in ((), (run_id,)):
        assert run(stack, "list", *arguments) == 0
        assert saved in capsys.readouterr().out
    assert run(stack, "list", run_id, "--json") == 0
    assert saved in [one["tinker_path"] for one in json.loads(capsys.readouterr().out)]
    assert run(stack, "pin", saved) == 0
    assert run(stack, "show", saved, "--json") == 0
    details: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (details["pinned"], details["step"], details["lora_rank"]) == (True, 2, 4)
    assert [file["name"] for file in details["files"]] == sorted(FILES)
    assert run(stack, "unpin", saved) == 0
    assert run(stack, "show", saved) == 0
    shown = capsys.readouterr().out
    assert "pinned           False" in shown
    assert f"SHA-256 {details['files'][0]['sha256']}" in shown


def test_prune_shows_its_plan_and_does_it_when_told_to(
    stack: Stack, service: tinker.ServiceClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client = new_model(service, rank=2)
    paths = [client.save_state(f"n{n}").result().path for n in range(4)]
    run_id = paths[0].removeprefix("tinker://").split("/")[0]
    assert run(stack, "pin", paths[0]) == 0
    assert run(stack, "prune", run_id, "--keep-last", 1, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "2 stay; 2 would be deleted" in shown
    assert f"{paths[0]}" in shown
    assert "kept: pinned" in shown
    assert run(stack, "prune", run_id, "--keep-last", 1) == 2
    assert "--yes: needed" in capsys.readouterr().err
    assert run(stack, "verify", *paths) == 0
    assert run(stack, "prune", run_id, "--keep-last", 1, "--yes", "--save") == 0
    assert "deleted 2" in capsys.readouterr().out
    folder = stack.checkpoints / run_id / "weights"
    assert sorted(path.name for path in folder.iterdir()) == ["n0", "n3"]
    assert run(stack, "prune", run_id, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert {one["checkpoint_id"]: one["kept_as"] for one in plan["keep"]} == {
        "weights/n0": ["pinned"], "weights/n3": ["last"]
    }  # fmt: skip
