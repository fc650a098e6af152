"""`tinsmith drain`: what it asks the server, prints and waits for."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith_cli import main
from tinsmith_cli.client import ApiClient, Unreachable

NAMES = {"one:8001": "a" * 8, "two:8001": "b" * 8}


def trainer(address: str, **facts: Any) -> dict[str, Any]:
    """A trainer as GET /api/v1/trainers tells it."""
    return {
        "address": address,
        "trainer_id": NAMES[address],
        "boot_id": "first",
        "base_models": ["tiny"],
        "state": "serving",
        "is_drained": False,
        "can_be_stopped": False,
        "num_runs": 0,
        "num_moving": 0,
        "problems": {},
        **facts,
    }


class Server:
    """Answers calls in the order in which they are listed; the last answer stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *firsts: dict[str, Any]) -> None:
        self.answers: list[Any] = [{"trainers": [first, trainer("two:8001", num_runs=1)]} for first in firsts]
        self.calls: list[tuple[str, Any]] = []
        monkeypatch.setattr(ApiClient, "call", self._call)
        monkeypatch.setattr("tinsmith_cli.drain._LOOK_S", 0.0)

    def _call(self, path: str, *, content: Any = None, **_: Any) -> Any:
        self.calls.append((path, content))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_without_a_name_the_trainers_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch, trainer("one:8001", is_drained=True, num_runs=3))
    assert main(["drain"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["one:8001", "aaaaaaaa", "draining", "3", "runs", "tiny"],
        ["two:8001", "bbbbbbbb", "serving", "1", "run", "tiny"],
    ]
    assert server.calls == [("trainers", None)]


def test_it_waits_for_a_gateway_that_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = trainer("one:8001", is_drained=True, num_runs=1)
    server = Server(monkeypatch, left, left, trainer("one:8001", is_drained=True, can_be_stopped=True))
    away = Unreachable("no Tinsmith answers at http://127.0.0.1:8000: refused")
    server.answers[1:1] = [away, away]
    assert main(["drain", "one:8001"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one:8001: 1 run is left",
        "one:8001: 1 run is left",
        f"    the server: {away}",
        "one:8001: 1 run is left",
        "one:8001 can be stopped: none of its runs is left there",
    ]


@pytest.mark.parametrize("name", ["one:8001", "a" * 8])
def test_it_waits_until_the_trainer_can_be_stopped_and_says_what_keeps_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    stuck = trainer("one:8001", is_drained=True, num_runs=1, problems={"r": "no room"})
    server = Server(
        monkeypatch,
        trainer("one:8001", is_drained=True, num_runs=2),
        stuck,
        stuck,
        trainer("one:8001", is_drained=True, num_moving=1),
        trainer("one:8001", is_drained=True, can_be_stopped=True),
    )
    assert main(["drain", name]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one:8001: 2 runs are left",
        "one:8001: 1 run is left",
        "    r: no room",
        "one:8001: the last moves are being finished",
        "one:8001 can be stopped: none of its runs is left there",
    ]
    asked = {"trainer": name, "until_restart": False}
    assert server.calls == [("trainers/drain", asked), *[("trainers", None)] * 4]


def test_it_need_not_wait(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(monkeypatch, trainer("one:8001", is_drained=True, num_runs=2))
    assert main(["drain", "one:8001", "--no-wait"]) == 0
    assert capsys.readouterr().out == "one:8001: 2 runs are left\n"
    assert len(server.calls) == 1


def test_draining_can_be_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(monkeypatch, trainer("one:8001"))
    assert main(["drain", "one:8001", "--undo"]) == 0
    assert capsys.readouterr().out == "one:8001 takes runs again\n"
    assert server.calls == [("trainers/undrain", {"trainer": "one:8001"})]


def test_the_waiting_ends_when_somebody_ends_the_draining(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Server(monkeypatch, trainer("one:8001", is_drained=True, num_runs=2), trainer("one:8001", num_runs=2))
    assert main(["drain", "one:8001"]) == 2
    assert "one:8001 is not being drained any more: somebody has ended it (--undo)" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--undo", "--no-wait"])
def test_flags_need_a_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    server = Server(monkeypatch, trainer("one:8001"))
    assert main(["drain", flag]) == 2
    assert "TRAINER: missing" in capsys.readouterr().err
    assert server.calls == []


def test_a_trainer_is_restarted_once_it_is_empty_and_takes_runs_when_its_new_process_serves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Server(
        monkeypatch,
        trainer("one:8001", is_drained=True, num_runs=1),
        trainer("one:8001", is_drained=True, can_be_stopped=True),
        trainer("one:8001", is_drained=True, can_be_stopped=True),  # the command has ended, the old process has not
        trainer("one:8001", is_drained=True, can_be_stopped=True, state="gone"),
        trainer("one:8001", is_drained=True, can_be_stopped=True, state="loading", boot_id="second"),
        trainer("one:8001", is_drained=True, can_be_stopped=True, boot_id="second"),
        trainer("one:8001", boot_id="second"),
    )
    server.answers.insert(3, Unreachable("no Tinsmith answers"))
    assert main(["drain", "a" * 8, "--restart", "echo restart $TINSMITH_TRAINER $TINSMITH_TRAINER_ID"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "one:8001: 1 run is left",
        "one:8001 can be stopped: none of its runs is left there",
        "restart one:8001 aaaaaaaa",
        "one:8001: waiting until its new process serves",
        "one:8001 takes runs again",
    ]
    paths = [path for path, _ in server.calls]
    assert paths == ["trainers/drain", *["trainers"] * 6, "trainers/undrain"]


def test_a_trainer_stays_drained_when_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch, trainer("one:8001", is_drained=True, can_be_stopped=True))
    assert main(["drain", "one:8001", "--restart", "exit 3"]) == 2
    error = capsys.readouterr().err
    assert "--restart: 'exit 3' ended with status 3; one:8001 is empty" in error
    assert "tinsmith drain one:8001 --undo" in error
    assert [path for path, _ in server.calls] == ["trainers/drain"]


class Cluster:
    """Two trainers that can be drained, and are empty at once. Each look shows a new process after a drain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
        self.trainers = {"one:8001": trainer("one:8001"), "two:8001": trainer("two:8001", **facts)}
        self.calls: list[tuple[str, str]] = []
        monkeypatch.setattr(ApiClient, "call", self._call)
        monkeypatch.setattr("tinsmith_cli.drain._LOOK_S", 0.0)

    def _call(self, path: str, *, content: Any = None, **_: Any) -> Any:
        if content is not None:
            one = self.trainers[content["trainer"]]
            one["is_drained"] = one["can_be_stopped"] = path == "trainers/drain"
            self.calls.append((path, content["trainer"]))
        answer = [dict(one) for one in self.trainers.values()]
        for one in self.trainers.values():
            if one["is_drained"]:
                one["boot_id"] = "second"
        return {"trainers": answer}


def test_all_trainers_are_restarted_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    assert main(["drain", "--restart", "echo $TINSMITH_TRAINER"]) == 0
    assert cluster.calls == [(f"trainers/{verb}", name) for name in cluster.trainers for verb in ("drain", "undrain")]
    assert [line for line in capfd.readouterr().out.splitlines() if line in cluster.trainers] == list(cluster.trainers)


def test_a_trainer_that_was_drained_before_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, is_drained=True, state="gone")
    assert main(["drain", "--restart", "true"]) == 0
    assert {name for _, name in cluster.calls} == {"one:8001"}
    assert "two:8001 was drained before, and is left as it is" in capsys.readouterr().out


def test_nothing_is_restarted_while_a_trainer_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, state="gone")
    assert main(["drain", "--restart", "true"]) == 2
    assert "two:8001 does not serve (state: gone); nothing was drained" in capsys.readouterr().err
    assert cluster.calls == []


def test_until_restart_is_told_to_the_server_and_has_nothing_to_do_with_an_end_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch, trainer("one:8001", is_drained=True, can_be_stopped=True))
    assert main(["drain", "one:8001", "--until-restart"]) == 0
    assert server.calls == [("trainers/drain", {"trainer": "one:8001", "until_restart": True})]
    assert main(["drain", "one:8001", "--undo", "--until-restart"]) == 2
    assert "--until-restart: not with --undo" in capsys.readouterr().err
    assert main(["drain", "--until-restart"]) == 2
    assert "TRAINER: missing, which --until-restart needs" in capsys.readouterr().err
