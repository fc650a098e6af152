"""The jobs for Slurm start every node with a line that `tinsmith up` takes. Slurm's own commands are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tinsmith_cli.commands import make_parser
from tinsmith_cli.settings import Settings

FOLDER = Path(__file__).parents[3] / "examples" / "slurm"
JOBS = sorted(FOLDER.glob("*.sbatch"))
TOKEN = "n0:8100/" + "0" * 64 + "/the-service-key-of-all"

# The first node writes its token late; the others wait for it.
PROGRAMS = {
    "scontrol": 'for n in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do echo "n$n"; done',
    "srun": """shift
for n in $(seq $((SLURM_JOB_NUM_NODES - 1)) -1 0); do
    SLURM_NODEID=$n SLURMD_NODENAME=n$n "$@" &
done
wait""",
    "tinsmith": f"""python3 - "$@" <<'PY'
import json, os, pathlib, sys, time
state = pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1])
state.mkdir(parents=True, exist_ok=True)
(state / "argv.json").write_text(json.dumps([sys.argv[1:], os.environ.get("TINSMITH_JOIN", "")]))
if "--address" in sys.argv and "TINSMITH_JOIN" not in os.environ:
    time.sleep(0.3)
    (state / "cluster").mkdir(exist_ok=True)
    (state / "cluster/join-token").write_text("{TOKEN}")
PY""",
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run(job: str, programs: Path, state: Path, **env: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(state),
        "TINSMITH_STATE": str(state),
        "GATEWAY_API_KEYS": '["k"]',
        "SLURM_JOB_NODELIST": "n[0-9]",
        **env,
    }
    return subprocess.run(["bash", FOLDER / job], env=env, capture_output=True, text=True, timeout=60)


def settings_of(folder: Path) -> Settings:
    """The settings in the node's line, as the command line itself reads them."""
    argv, token = json.loads((folder / "argv.json").read_text())
    settings = Settings.of(make_parser().parse_args([*argv, *(["--join", token] if token else [])]))
    settings.check_up()
    return settings


def test_a_job_on_one_node_runs_everything_there(programs: Path, tmp_path: Path) -> None:
    done = run("one_node.sbatch", programs, tmp_path / "state", BASE_MODEL="Qwen/Qwen3-8B")
    assert done.returncode == 0, done.stderr
    settings = settings_of(tmp_path / "state")
    assert (settings.base_model, settings.host, settings.join) == (["Qwen/Qwen3-8B"], "0.0.0.0", "")
    assert set(settings.roles) == {"gateway", "trainer", "sampler"}


def test_a_job_on_several_nodes_gives_each_its_role_and_the_token(programs: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "0/cluster").mkdir(parents=True)
    (state / "0/cluster/join-token").write_text("the token of an earlier job")
    done = run("several_nodes.sbatch", programs, state, SLURM_JOB_NUM_NODES="4", TRAINER_NODES="2")
    assert done.returncode == 0, done.stderr
    assert "the gateway is at http://n0:8000" in done.stdout
    nodes = [settings_of(state / str(number)) for number in range(4)]
    assert [",".join(node.roles) for node in nodes] == ["trainer,gateway", "trainer", "sampler", "sampler"]
    assert [node.trainer_nodes for node in nodes] == [2, 2, 1, 1]
    assert [node.address for node in nodes] == ["n0", "n1", "n2", "n3"]
    assert [node.join for node in nodes] == ["", TOKEN, TOKEN, TOKEN]


def test_a_job_without_keys_or_without_samplers_ends_and_says_why(programs: Path, tmp_path: Path) -> None:
    for job in ("one_node.sbatch", "several_nodes.sbatch"):
        done = run(job, programs, tmp_path / "state", GATEWAY_API_KEYS="", SLURM_JOB_NUM_NODES="2")
        assert done.returncode
        assert "GATEWAY_API_KEYS: a JSON list" in done.stderr
    done = run("several_nodes.sbatch", programs, tmp_path / "state", SLURM_JOB_NUM_NODES="2", TRAINER_NODES="2")
    assert done.returncode == 2
    assert "TRAINER_NODES: 2 of the 2 nodes would train, and none sample" in done.stderr


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_directives_stand_before_the_first_command(job: Path) -> None:
    """Slurm does not read those after it."""
    lines = job.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert sum(line.startswith("#SBATCH --nodes=") for line in lines) == 1
