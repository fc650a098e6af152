"""Models and engines that are really broken, through the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from tests.support.models import make_model, make_vision_model
from tinsmith.modeling import adaptation, attention, kv_cache
from tinsmith_cli import hub, main
from tinsmith_cli.doctor import oracle
from tinsmith_cli.doctor.subject import Subject, read_config

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    def run(model: Path, *flags: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "doctor.json"
        status = main(["doctor", str(model), "--quick", "--threads", "1", "--rank", "4", "--json", str(file), *flags])
        return status, json.loads(file.read_text()) if file.exists() else {}

    return run


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def failed(report: dict[str, Any]) -> set[str]:
    return {check["section"] for check in report["checks"] if check["status"] == "FAILED"}


@pytest.mark.slow
def test_a_packed_forward_that_is_wrong_is_trained_and_sampled_one_by_one(
    model_folder: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_sdpa", "attend"):  # of generation, and of training
        real = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda q, *others, real=real, **flags: real(2 * q, *others, **flags))
    status, report = doctor(model_folder)
    assert status == 0
    assert failed(report) == set()
    assert (report["ok"], report["trainable"], report["sampleable"]) == (True, True, True)
    out = " ".join(capsys.readouterr().out.split())
    assert "note: it runs one sequence at a time, which is slow: packed, its logprobs differ by" in out


def test_it_says_whether_pictures_and_adapters_on_their_layers_work(
    tmp_path: Path, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = doctor(make_vision_model(tmp_path / "model"))
    assert status == 0
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(r"it sees pictures through a vision tower: handled; train_vision adapts (\d+) of its layers", out)
    assert found is not None
    assert int(found[1]) > 2


def test_decoding_that_is_wrong_is_found_and_the_model_stays_trainable(
    model_folder: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts alone would not show it: nothing else reads the cache. The sampler finds it when it is loaded."""
    real = kv_cache.masked
    monkeypatch.setattr(kv_cache, "masked", lambda q, *args: real(2 * q, *args))
    status, report = doctor(model_folder)
    assert status == 1
    (check,) = (check for check in report["checks"] if check["status"] == "FAILED")
    assert check["section"] == "sampler torch"
    assert "decoding is wrong for this model: tokens drawn from it" in check["detail"]
    assert report["trainable_groups"] == ["attn", "mlp", "unembed"]
    assert report["sampling_engines"] == []


@pytest.mark.slow
def test_a_model_with_less_than_it_should_have_says_what_is_missing(model_folder: Path, doctor: Doctor) -> None:
    status, report = doctor(model_folder)
    assert status == 0
    warnings = {check["name"]: check for check in report["checks"] if check["status"] == "warning"}
    assert set(warnings) == {"tokenizer"}
    assert "send tokens" in warnings["tokenizer"]["advice"]
    assert report["measured"]["room"]["longest_sequence"] == 256


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + b"\0" * 30), "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (
            lambda folder: edit_config(folder, intermediate_size=48),
            "layers.0.mlp.down_proj.weight is [",
        ),
        (
            lambda folder: edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.C"}),
            "Python code of its own (auto_map in config.json), which is not run here",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "no-such"}'), "no-such"),
        (
            lambda folder: AutoConfig.for_model("vit").save_pretrained(folder),
            "no causal language model",
        ),
    ],
    ids=["corrupt", "no weights", "other shape", "own code", "no JSON", "unknown type", "no language model"],
)
def test_files_that_cannot_be_loaded_are_one_line(
    model_folder: Path, tmp_path: Path, doctor: Doctor, capsys: pytest.CaptureFixture[str], spoil: Any, said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    spoil(folder)
    status, report = doctor(folder)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("...")]
    assert status in (1, 2)
    assert len(lines) == 1
    assert lines[0].startswith("tinsmith: ")
    assert said in lines[0]
    assert report["ok"] is False
    assert said in report["error"]


def test_files_of_another_size_are_not_taken_for_good(tmp_path: Path) -> None:
    """transformers draws what is not in the files at random, without an error."""
    folder = make_model(tmp_path / "model", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config.update(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    (folder / "config.json").write_text(json.dumps(config))
    subject = Subject(str(folder), read_config(str(folder)), torch.device("cpu"), torch.float32, 4, 128, 1, quick=True)
    missing = oracle.examine(subject, subject.sequences()[:1], {}, None).missing
    assert missing
    assert all(name.startswith("model.layers.1.") for name in missing)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/folder"], "MODEL: '/no/such/folder': /no/such/folder is neither a folder nor a hub id"),
        (["."], "holds no config.json"),
        (["{model}", "--device", "cuda"], "--device: cuda"),
        (["{model}", "--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_model_that_cannot_be_examined_is_status_2(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", *(one.format(model=model_folder) for one in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_hub_that_ends_its_answers_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(path: str, **options: object) -> None:
        raise OSError("We couldn't connect to the hub to load the files.\nCheck your internet connection.")

    monkeypatch.setattr(hub, "require", lambda *_, **__: None)  # it has answered a moment before
    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    assert main(["doctor", "nobody/nothing", "--threads", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tinsmith: nobody/nothing: config.json cannot be read from the hub or its cache; check the name"
    )
    assert "We couldn't connect to the hub" in line


def test_memory_that_runs_out_is_one_line(
    model_folder: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("tinsmith_cli.doctor.examine.examine", full)
    status, report = doctor(model_folder)
    assert (status, report["ok"]) == (1, False)
    (line,) = capsys.readouterr().err.splitlines()
    assert "out of memory on cpu; take fewer --tokens" in line
    assert "out of memory on cpu" in report["error"]


def test_weights_are_missed_before_an_engine_is_loaded(
    model_folder: Path, tmp_path: Path, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    status, report = doctor(folder)
    assert (status, report["ok"]) == (2, False)
    assert "loading" not in capsys.readouterr().err


def test_the_report_of_an_earlier_run_does_not_stay_when_there_is_nothing_to_examine(
    tmp_path: Path, doctor: Doctor
) -> None:
    (tmp_path / "doctor.json").write_text('{"ok": true}')
    status, report = doctor(Path("/no/such/folder"))
    assert (status, report["ok"]) == (2, False)
    assert "neither a folder nor a hub id" in report["error"]


def test_a_model_of_layers_that_take_no_adapters_is_trainable_in_part_only(
    tmp_path: Path, doctor: Doctor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "_linear", lambda module: module if type(module) is nn.Linear else None)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    status, report = doctor(tmp_path / "gpt2")
    assert (status, report["ok"]) == (1, False)
    assert (report["trainable_groups"], report["untrainable_groups"]) == (["unembed"], ["attn", "mlp"])
    checks = {check["name"]: check for check in report["checks"] if check["status"] == "FAILED"}
    assert set(checks) == {"adapters on attn", "adapters on mlp"}
    assert all("Conv1D" in check["detail"] for check in checks.values())
    out = capsys.readouterr().out
    assert "trainable:  partly, with train_attn=false, train_mlp=false: adapters on unembed" in out
    assert "of rank 8 on unembed" in out
    assert "on all layers" not in out


def test_as_a_process_it_ends_with_its_status() -> None:
    command = [sys.executable, "-m", "tinsmith_cli", "doctor", "/no/such/folder"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert process.stdout == ""
    assert len(process.stderr.splitlines()) == 1


@pytest.mark.parametrize("missing", ["trainer_service.engine.engine", "sampler_service.config"])
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_folder: Path, missing: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("tinsmith_cli.doctor") or name == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # importing it raises ModuleNotFoundError
    assert main(["doctor", str(model_folder)]) == 2
    assert "pip install 'tinsmith[trainer,sampler]'" in capsys.readouterr().err
