"""`tinsmith plan` and the plan of `tinsmith up`, on recorded machines."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.plans.nvml import FOLDER, MACHINES, MODELS, machine_of
from tests.unit.cli.planning.plan_rows import planned
from tinsmith_cli import main, up
from tinsmith_cli.planning import command
from tinsmith_cli.planning.constraints import constraints_of, usable
from tinsmith_cli.planning.described import CARDS, described
from tinsmith_cli.planning.plan import DoesNotFit
from tinsmith_cli.planning.planner import plan
from tinsmith_cli.planning.report import as_json
from tinsmith_cli.settings import Settings
from tinsmith_cli.supervisor import Service

On = Callable[[str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Takes a recorded machine for this one."""
    for name in ("CUDA_VISIBLE_DEVICES", "TRAINER_MEMORY_BYTES", "SAMPLER_ENGINE"):
        monkeypatch.delenv(name, raising=False)

    def patch(machine: str) -> None:
        for module in (command, up):
            monkeypatch.setattr(module, "see", lambda: machine_of(machine))

    return patch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the configuration of Qwen3-8B."""
    return folder_of("Qwen3-8B", tmp_path)


def folder_of(name: str, tmp_path: Path) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(FOLDER / "models" / f"{name}.json", folder / "config.json")
    return folder


SHARED = """\
MODEL: 8.19 billion parameters, sequences of up to 40,960 tokens
on 1 x NVIDIA H100 80GB HBM3 (84.9 GB free); 26 cores, 240.0 GB of host memory free

trainer      GPU 0                1 rank
             base weights         16.4 GB in bfloat16
             training             19.1 GB
             adapters of rank 64  3 on the device, 20 with host memory
             longest sequence     22,396 tokens
sampler      GPU 0                engine vllm
             base weights         16.4 GB
             adapters             4 slots of rank 64, 1.4 GB; up to 3.0 GB in host memory
             keys and values      64,840 tokens of 147.5 kB, 9.6 GB
             prefix cache         4.8 GB
publish      shm                  738.3 MB to each sampler for an adapter of rank 64
host memory                       32.8 GB while the services load, of 240.0 GB free

export TRAINER_MEMORY_BYTES=19122370355
export SAMPLER_MAX_KV_TOKENS=64840
export SAMPLER_PREFIX_CACHE_BYTES=4780592588
export SAMPLER_ADAPTER_MEMORY_BYTES=2953183232
export SAMPLER_MAX_DEVICE_VERSIONS=4
tinsmith up --base-model MODEL --trainer-gpus 0 --sampler-gpus 0 --trainer-ranks 1 --samplers 1 --max-lora-rank 64 \
--engine vllm
"""


def test_the_text_shows_who_gets_what_and_the_command(on: On, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("1x-h100")
    assert main(["plan", str(model), "--engine", "vllm"]) == 0
    assert capsys.readouterr().out.replace(str(model), "MODEL") == SHARED


def test_json_has_the_figures(on: On, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on("2x-h100")
    assert main(["plan", str(model), "--engine", "vllm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["trainer"]["gpus"] == ["0"]
    assert found["samplers"][0]["gpus"] == ["1"]
    assert found["samplers"][0]["kv_tokens"] == 188_619
    assert found["publish_bytes"] == 738_295_808


@pytest.mark.parametrize("name", ["1x-rtx-4090", "8x-h100", "8x-h200", "none"])
def test_a_machine_that_is_described_has_the_plan_of_that_machine(
    name: str, on: On, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = machine_of(name)
    host = f"cores={recorded.cores},memory={recorded.host_bytes / 1e9:.0f}GB"
    answers = []
    for here, machine in (
        (name, []),
        ("mig", ["--machine", host if name == "none" else f"{name},{host}"]),
        ("mig", ["--machine", str(tmp_path / "there.json")]),
    ):
        on(here)
        assert main(["plan", str(model), "--quantize", "nf4", "--engine", "torch", "--json", *machine]) in (0, 1)
        answers.append(json.loads(capsys.readouterr().out))
        (tmp_path / "there.json").write_text(json.dumps(answers[0]))
    for answer in answers:
        for gpu in answer["machine"]["gpus"]:
            gpu["uuid"] = ""
    assert answers[0] == answers[1] == answers[2]


def test_a_machine_is_described_by_cards_or_their_memory() -> None:
    machine = described("2xH100, 1x 24 GB")
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA H100 80GB HBM3"] * 2 + ["GPU of 24 GB"]
    assert [gpu.id for gpu in machine.gpus] == ["0", "1", "2"]
    assert machine.gpus[2].free_bytes < machine.gpus[2].total_bytes == 24e9
    assert described("H100").gpus == described("1xH100").gpus
    assert (machine.cores, machine.host_bytes) == (48, 2 * (2 * 85_520_809_984 + 24_000_000_000))
    recorded = {(gpu.name, gpu.total_bytes, gpu.free_bytes) for name in MACHINES for gpu in machine_of(name).gpus}
    assert set(CARDS.values()) <= recorded


@pytest.mark.parametrize("text", ["8xH101", "H101", "1xH100,cores=many", "cores=8", "", "1x24", "no/such.json"])
def test_a_description_that_is_none_is_refused(text: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model), "--machine", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tinsmith: --machine: {text!r}: ")
    assert "memory=NGB" in line


def test_a_file_that_describes_no_machine_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(model), "--machine", str(model / "config.json")]) == 2
    assert "is not what `tinsmith plan MODEL --json` writes there (KeyError: 'machine')" in capsys.readouterr().err


def test_what_does_not_fit_ends_with_1_and_a_mistake_with_2(
    on: On, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on("1x-h100")
    large = str(folder_of("Llama-3.1-70B", tmp_path))
    assert main(["plan", large, "--engine", "vllm"]) == 1
    assert "the smallest change that makes it fit: 4 GPUs with 84.9 GB free" in capsys.readouterr().err
    assert main(["plan", large, "--engine", "vllm", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["change"].startswith("the smallest change")) == (False, True)
    for flags, message in (
        (["--gpus", "1"], "--gpus: '1': '1' is no GPU that can be used here"),
        (["--trainer-gpus", "2"], "--trainer-gpus: '2'"),
        (["--train-share", "1"], "--train-share: 1.0 is not between 0 and 1"),
        (["--train-share", "nan"], "--train-share: nan is not between 0 and 1"),
    ):
        assert main(["plan", large, *flags]) == 2
        assert message in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TRAINER_MEMORY_BYTES", "much", "'much' is not a whole number"),
        ("TRAINER_MEMORY_BYTES", "-1", "-1 is not at least 0"),
        ("TRAINER_TENSOR_PARALLEL", "0", "0 is not at least 1"),
        ("TRAINER_DTYPE", "float17", "'float17' is not one of auto, float32, bfloat16"),
        ("SAMPLER_DTYPE", "bf16", "'bf16' is not one of auto, float32, bfloat16, float16"),
        ("TRAINER_QUANTIZE", "int4", "'int4' is not one of int8, nf4"),
        ("SAMPLER_ENGINE", "sglang", "'sglang' is not one of auto, vllm, torch"),
    ],
)
def test_a_variable_with_a_wrong_value_is_refused(
    name: str,
    value: str,
    message: str,
    on: On,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on("1x-h100")
    monkeypatch.setenv(name, value)
    assert main(["plan", str(model)]) == 2
    assert f"{name}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_command_of_a_plan_gives_this_plan_again(machine: str, trainers: int) -> None:
    for name in MODELS[:-2]:  # the last two fit nowhere
        try:
            first = planned(machine, name, trainers=trainers)
        except DoesNotFit:
            continue
        *exports, line = as_json(first)["command"]
        env = dict(export.removeprefix("export ").split("=", 1) for export in exports)
        settings = parsed(shlex.split(line)[2:])
        here = usable(machine_of(machine), settings)
        again = plan(name, first.shape, here, constraints_of(settings, here, env))
        assert again.trainer == first.trainer
        assert list(again.samplers) == list(first.samplers)
        assert [again.trainer_env(number) for number in range(first.num_trainers)] == [
            first.trainer_env(number) for number in range(first.num_trainers)
        ]


def parsed(argv: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser()
    Settings.add_flags(parser)
    return Settings.of(parser.parse_args(argv))


def services_of(argv: Sequence[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[int, list[Service]]:
    """The services that `tinsmith up` would run."""
    started: list[Service] = []

    async def record(services: Sequence[Service], **_: Any) -> int:
        started.extend(services)
        return 0

    monkeypatch.setattr(up, "supervise", record)
    code = main(["up", "--port", "0", "--state-dir", str(tmp_path / "state"), *argv])
    return code, started


def test_up_gives_each_service_its_gpus_and_its_memory(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on("8x-h100")
    model = folder_of("Qwen3-32B", tmp_path)
    code, (trainer, first, second, gateway) = services_of(
        ["--base-model", str(model), "--engine", "vllm"], monkeypatch, tmp_path
    )
    assert code == 0
    assert trainer.argv[trainer.argv.index("--nproc-per-node") + 1] == "4"
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert trainer.env["TRAINER_SHARD_BASE"] == "true"
    assert int(trainer.env["TRAINER_MEMORY_BYTES"]) > 50e9
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in (first, second)] == ["4,5", "6,7"]
    assert {one.env["SAMPLER_TENSOR_PARALLEL"] for one in (first, second)} == {"2"}
    assert {one.env["CUDA_DEVICE_ORDER"] for one in (trainer, first, second)} == {"PCI_BUS_ID"}
    assert (first.name, second.name) == ("sampler-1", "sampler-2")
    assert "CUDA_VISIBLE_DEVICES" not in gateway.env
    assert "plan of Qwen3-32B: 4 ranks of the trainer on GPU 0,1,2,3" in capsys.readouterr().out


def test_up_gives_each_of_several_trainers_gpus_of_its_own(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("8x-h100")
    flags = ["--base-model", str(folder_of("Qwen3-8B", tmp_path)), "--engine", "vllm", "--trainers", "2"]
    code, services = services_of(flags, monkeypatch, tmp_path)
    assert code == 0
    visible = {one.name: one.env.get("CUDA_VISIBLE_DEVICES") for one in services}
    assert (visible["trainer-1"], visible["trainer-2"]) == ("0,1", "2,3")
    assert [visible[f"sampler-{number}"] for number in range(1, 5)] == ["4", "5", "6", "7"]
    first, second = (one for one in services if one.name.startswith("trainer"))
    assert {one.argv[one.argv.index("--nproc-per-node") + 1] for one in (first, second)} == {"2"}
    assert first.env["TRAINER_MEMORY_BYTES"] == second.env["TRAINER_MEMORY_BYTES"]


def test_up_divides_the_gpus_among_several_base_models(on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on("8x-h100")
    flags = [part for name in MODELS[:2] for part in ("--base-model", str(folder_of(name, tmp_path)))]
    _, services = services_of([*flags, "--engine", "vllm"], monkeypatch, tmp_path)
    visible = {one.name: one.env.get("CUDA_VISIBLE_DEVICES") for one in services}
    assert visible["trainer-1"] == "0,1"
    assert visible["trainer-2"] == "4,5"
    assert [visible[f"sampler-{model}-{n}"] for model in (1, 2) for n in (1, 2)] == ["2", "3", "6", "7"]


def test_up_refuses_what_does_not_fit_before_anything_starts(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for machine, name in (("1x-h100", "Llama-3.1-70B"), ("none", "Qwen3-8B")):
        on(machine)
        model = folder_of(name, tmp_path)
        code, started = services_of(["--base-model", str(model)], monkeypatch, tmp_path)
        assert (code, started) == (2, [])
        error = capsys.readouterr().err
        assert f"{name} does not fit: " in error
        assert "the smallest change that makes it fit" in error


def test_up_on_a_cpu_sets_nothing_but_the_pages_that_services_share(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_of("Qwen3-0.6B", tmp_path)
    names = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    pages = {"TRAINER_BASE_PAGES", "SAMPLER_BASE_PAGES"}
    on("none")
    _, services = services_of(["--base-model", str(model)], monkeypatch, tmp_path)
    assert [one.name for one in services] == ["trainer", "sampler", "gateway"]
    given = {name for one in services for name in one.env}
    assert {name for name in given if name in names or name.startswith(("TRAINER_", "SAMPLER_"))} <= pages
    assert pages <= given or sys.platform != "linux"
    on("8x-h100")
    _, (trainer, sampler, _) = services_of(["--base-model", str(model), "--gpus", "none"], monkeypatch, tmp_path)
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == sampler.env["CUDA_VISIBLE_DEVICES"] == ""
    assert "TRAINER_MEMORY_BYTES" not in trainer.env


def test_up_starts_a_model_that_the_planner_does_not_know_and_says_so(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on("8x-h100")
    model = folder_of("Qwen3-0.6B", tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "gemma9"}))
    code, services = services_of(["--base-model", str(model)], monkeypatch, tmp_path)
    assert (code, len(services)) == (0, 3)
    assert "no plan: " in capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES" not in services[0].env


def test_gpus_of_one_service_are_for_one_base_model(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on("8x-h100")
    flags = [part for name in MODELS[:2] for part in ("--base-model", str(folder_of(name, tmp_path)))]
    code, started = services_of([*flags, "--trainer-gpus", "0"], monkeypatch, tmp_path)
    assert (code, started) == (2, [])
    assert "--trainer-gpus: is for one base model, and 2 are served" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_planning_loads_no_torch() -> None:
    program = (
        "import sys, tinsmith_cli.planning.command; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_hub_id_that_cannot_be_had_tells_what_to_do(
    on: On, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on("1x-h100")
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=OSError("no\nnetwork")))
    assert main(["plan", "nobody/nothing"]) == 2
    said = "cannot be read from the hub or its cache; check the name and the network, or name a folder that holds it"
    assert f"nobody/nothing: config.json {said} (no network)" in capsys.readouterr().err


def test_up_reports_a_model_without_a_tokenizer(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on("none")
    model = folder_of("Qwen3-0.6B", tmp_path)
    said = f"{model} has no files of a tokenizer: clients can only send tokens"
    _, (_, _, gateway) = services_of(["--base-model", str(model)], monkeypatch, tmp_path)
    assert "--tokenizers" not in gateway.argv
    assert said in capsys.readouterr().out
    (model / "tokenizer.json").write_text("{}")
    _, (_, _, gateway) = services_of(["--base-model", str(model)], monkeypatch, tmp_path)
    assert "--tokenizers" in gateway.argv
    assert said not in capsys.readouterr().out
