import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith_cli import main
from tinsmith_cli.base_models import ServedModel
from tinsmith_cli.ports import free_ports
from tinsmith_cli.settings import Settings
from tinsmith_cli.stack import ServiceKeys, Site, Stack, Tls
from tinsmith_cli.up import _base_pages, _configs, _default_model, _keys, _next_steps, _overridden_variables


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["up", *argv])
    return code, capsys.readouterr().err


def test_what_a_killed_first_start_has_left_of_the_default_model_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "base_models" / ".small-qwen3.half"
    part.mkdir(parents=True)
    (part / "tokenizer.json").write_text("{")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    assert _default_model(tmp_path) == tmp_path / "base_models" / "small-qwen3"
    assert not part.exists()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = run("--port", str(port), "--state-dir", str(tmp_path / "state"), capsys=capsys)
    assert code == 2
    assert f"--port {port}" in error
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("flag", ["--trainer-port", "--sampler-port"])
def test_a_port_of_a_service_that_is_in_use_is_refused_before_anything_starts(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    flags = ["--base-model", str(tmp_path / "model"), "--state-dir", str(tmp_path / "state"), "--gpus", "none"]
    port = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        code, error = run("--port", str(port), flag, str(taken), *flags, capsys=capsys)
    assert code == 2
    assert f"{flag} {taken}: cannot listen there" in error
    code, error = run("--port", str(port), flag, str(port), *flags, capsys=capsys)
    assert code == 2
    assert f"{flag}: {port} is also a port of --port" in error
    code, error = run("--port", str(port), flag, "65535", "--trainers", "2", "--samplers", "2", *flags, capsys=capsys)
    assert code == 2
    assert f"{flag}: 65536 is no port" in error
    first = ["--address", "127.0.0.1", "--join-port", str(port)]
    for other, its_port in ((flag, free_ports(1)[0]), ("--join-port", port)):
        code, error = run(*first, "--port", str(its_port), flag, str(port), *flags, capsys=capsys)
        assert code == 2
        assert f"{other}: {port} is also a port of --" in error
    assert not (tmp_path / "state" / "logs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port: 70000"),
        (["--host", "0.0.0.0"], "--host: '0.0.0.0' can be reached from other machines"),
        (["--host", "no-such-host.invalid", "--api-key", "k"], "--host no-such-host.invalid"),
        (["--api-key", ""], "--api-key"),
        (["--trainer-threads", "0"], "--trainer-threads: 0"),
        (["--checkpoint-dir", "s4://bucket"], "--checkpoint-dir: 's4://bucket' is neither a path, nor s3://BUCKET"),
        (["--trainer-ranks", "0"], "--trainer-ranks: 0"),
        (["--log-mb", "0.5"], "--log-mb: 0.5 is not at least 1"),
        (["--startup-timeout", "0"], "--startup-timeout: 0.0 is not at least 1"),
        (["--startup-timeout", "nan"], "--startup-timeout: nan is not at least 1"),
        (["--log-mb", "nan"], "--log-mb: nan is not at least 1"),
        (["--base-model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_bad_flag_is_refused_by_name_and_value(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GATEWAY_API_KEYS", raising=False)
    code, error = run(*flags, "--state-dir", str(tmp_path / "state"), capsys=capsys)
    assert code == 2
    assert message in error
    assert not (tmp_path / "state").exists()


def test_variables_that_are_no_settings_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_MAX_MODELZ", "a secret")
    monkeypatch.setenv("SAMPLER_2_GPU", "1")
    monkeypatch.setenv("GATEWAY_DATABASE_URL", "")
    assert main(["up", "--port", "0", "--gpus", "77", "--state-dir", str(tmp_path / "state")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "TRAINER_MAX_MODELZ in the environment is no setting and has no effect; did you mean TRAINER_MAX_MODELS?",
        "SAMPLER_2_GPU in the environment is no setting and has no effect",
    ]


OWN = {
    *(f"{service}_{name}" for service in ("TRAINER", "SAMPLER", "GATEWAY") for name in ("METRICS_PORT", "CORES_PAGE")),
    *("TRAINER_SAMPLERS", "GATEWAY_TRAINERS", "GATEWAY_SAMPLERS", "TRAINER_SERVICES_FILE", "GATEWAY_SERVICES_FILE"),
    *("TRAINER_SERVICE_KEY", "SAMPLER_SERVICE_KEY", "GATEWAY_SERVICE_KEY"),
}
"""Settings that `tinsmith up` finds itself."""


@pytest.mark.parametrize("site", [None, Site(("trainer", "sampler", "gateway"), "127.0.0.2", Path("/services.json"))])
def test_each_variable_in_whose_place_a_service_gets_another_value_is_reported_with_the_flag(
    site: Site | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All settings of all services are in the environment."""
    for kind, config in _configs().items():
        for field in config.model_fields:
            monkeypatch.setenv(f"{kind}_{field}".upper(), "elsewhere")
    settings = Settings(
        state_dir=Path("/state"), checkpoint_dir="/c", deterministic=True, engine="torch", sampler_threads=2
    )
    tls = Tls(Path("/cert"), Path("/key"), Path("/certificates"))
    stack = Stack(settings, [ServedModel("/m/a", ("a",))], ServiceKeys('["tml-secret"]', "secret"), tls, site=site)
    groups = stack.groups()
    services = stack.services(groups)
    reported = {re.split("[= ]", one)[0]: one for one in _overridden_variables(stack, groups, os.environ)}
    flags = {f"{service.name}_{flag[2:]}" for service in services for flag in service.argv[4::2]}
    of_keys = {name for service in services for name in service.env if name.endswith(("_SERVICE_KEY", "WAY_API_KEYS"))}
    assert set(reported) == {flag.replace("-", "_").upper() for flag in flags} | of_keys
    assert {name for name, sentence in reported.items() if sentence.endswith("; no flag changes it")} == OWN & set(
        reported
    )
    assert reported["TRAINER_BASE_MODEL"] == (
        "TRAINER_BASE_MODEL=elsewhere in the environment has no effect: `tinsmith up` gives the trainer /m/a; set it "
        "by --base-model"
    )
    assert "elsewhere" not in reported["GATEWAY_SERVICE_KEY"] + reported["GATEWAY_API_KEYS"]
    assert not any("secret" in sentence for sentence in reported.values())


def test_a_variable_that_one_of_several_services_gets_is_not_reported() -> None:
    stack = Stack(Settings(state_dir=Path("/state")), [ServedModel("/m/a", ("a",)), ServedModel("/m/b", ("b",))])
    assert not _overridden_variables(stack, stack.groups(), {"TRAINER_BASE_MODEL": "/m/b", "SAMPLER_MAX_RUNNING": "7"})


def test_a_value_in_another_form_is_not_reported() -> None:
    settings = Settings(state_dir=Path("/state"), checkpoint_dir=str(Path("here").absolute()), deterministic=True)
    stack = Stack(settings, [ServedModel("/m/a", ("a",))], ServiceKeys('["tml-a", "tml-b"]', "secret"))
    env = {"TRAINER_CHECKPOINT_DIR": "here", "TRAINER_DETERMINISTIC": "1", "GATEWAY_API_KEYS": '["tml-a","tml-b"]'}
    assert not _overridden_variables(stack, stack.groups(), env)
    (sentence,) = _overridden_variables(stack, stack.groups(), {"GATEWAY_API_KEYS": '["tml-c"]'})
    assert "its own value; set it by --api-key" in sentence


def test_the_next_steps_name_the_address_and_no_key() -> None:
    steps = _next_steps("http://127.0.0.1:8123", None)
    assert "export TINKER_BASE_URL=http://127.0.0.1:8123 TINKER_API_KEY=tml-anything\n" in steps
    assert "other machines" not in steps
    steps = _next_steps("http://0.0.0.0:8000", None)
    assert "\nOn other machines: the name of this one in place of 0.0.0.0\n" in steps
    steps = _next_steps("https://a:1", ServiceKeys('["tml-secret"]', "secret"))
    assert "TINKER_BASE_URL=https://a:1 TINKER_API_KEY=YOUR_KEY\n" in steps
    assert "secret" not in steps


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], "", None),
        ([], "[]", None),
        (["tml-a"], "", ["tml-a"]),
        ([], '["tml-b", {"key": "tml-c", "name": "c"}]', ["tml-b", {"key": "tml-c", "name": "c"}]),
        (["tml-a"], '["tml-b"]', ["tml-a"]),
    ],
)
def test_keys_come_from_the_command_line_else_from_the_environment(
    flags: list[str], environment: str, expected: list[object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_API_KEYS", environment)
    keys, others = (_keys("127.0.0.1", flags, state_dir=tmp_path) for _ in range(2))
    assert (keys and json.loads(keys.api_keys)) == expected
    if keys and others:
        assert len(keys.service_key) >= 32
        assert keys.service_key != others.service_key  # made anew at every start


def test_keys_that_are_no_json_are_refused_and_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_API_KEYS", "tml-secret")
    code, error = run("--state-dir", str(tmp_path / "state"), capsys=capsys)
    assert code == 2
    assert "GATEWAY_API_KEYS: is not a JSON list" in error
    assert "tml-secret" not in error


def test_a_state_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, error = run("--port", "0", "--state-dir", str(tmp_path), capsys=capsys)
    assert code == 2
    assert f"another `tinsmith up` uses {tmp_path}" in error


@pytest.mark.parametrize("argv", [["--help"], ["up", "--help"], ["make-base-model", "--help"], ["--version"]])
def test_help_and_version_end_well(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    assert "tinsmith" in capsys.readouterr().out


def test_up_loads_no_torch() -> None:
    program = (
        "import sys, tinsmith_cli, tinsmith_cli.up; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout == "[]\n"


@pytest.mark.parametrize("argv", [["up", "--port", "0"], ["keys", "create", "--owner", "ada"]])
def test_a_package_of_the_services_that_is_not_installed_is_named(argv: list[str], tmp_path: Path) -> None:
    argv = [*argv, "--state-dir", str(tmp_path / "state")]
    program = f"import sys; sys.modules['sqlalchemy'] = None; import tinsmith_cli; sys.exit(tinsmith_cli.main({argv}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "tinsmith: the Python package sqlalchemy is not installed: pip install 'tinsmith[all]'\n"
    assert not (tmp_path / "state").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="files of memory are Linux's")
def test_services_get_one_file_of_memory_unless_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TRAINER_BASE_PAGES", "SAMPLER_BASE_PAGES")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    (path,) = set(_base_pages().values())
    with open(path, "r+b") as file:
        assert file.read() == b""
    monkeypatch.setenv(names[0], "")
    assert list(_base_pages()) == [names[1]]
    monkeypatch.setenv(names[1], "/proc/1/fd/3")
    assert _base_pages() == {}


def test_a_machine_without_files_of_memory_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: str) -> int:
        raise OSError(38, "Function not implemented")

    for name in ("TRAINER_BASE_PAGES", "SAMPLER_BASE_PAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    assert _base_pages() == {}
    said = capsys.readouterr()
    assert "Function not implemented" in said.out + said.err
    monkeypatch.delattr(os, "memfd_create")
    assert _base_pages() == {}
