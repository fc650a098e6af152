"""Sessions, projects, bills and the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from tinker import types

from tests.conformance.kit import Absent, case
from tests.conformance.world import World, need, settle


@case("list the sessions, describe a session")
def sessions(world: World) -> None:
    get_session, list_sessions = need(world.rest, "get_session"), need(world.rest, "list_sessions")
    session_id = world.service.holder.get_session_id()
    assert world.trained is not None
    assert session_id in settle(list_sessions(limit=1000)).sessions, "the session is not listed"
    found = settle(get_session(session_id))
    assert world.trained.model_id in found.training_run_ids, found
    assert world.sampler._sampling_session_id in found.sampler_ids, found


@case("put a session into a project")
def project(world: World) -> None:
    assign = need(world.rest, "assign_session_project")
    assert world.trained is not None
    settle(assign(world.service.holder.get_session_id(), "conformance"))
    need(world.rest, "list_training_runs", "project_id")
    found = settle(world.rest.list_training_runs(limit=1000, project_id="conformance")).training_runs
    assert world.trained.model_id in [run.training_run_id for run in found], "the run is not in the project"


@case("search the sessions")
def search(world: World) -> None:
    find = need(world.rest, "search_sessions")
    session_id = world.service.holder.get_session_id()
    found = settle(find(types.SessionSearchRequest(session_id=session_id))).sessions
    assert [one.session_id for one in found] == [session_id], found


@case("trace of a session")
def trace(world: World) -> None:
    export = need(world.rest, "export_session_trace")
    assert world.trained is not None
    url = settle(export(world.service.holder.get_session_id()))
    events = json.loads(httpx.get(url, timeout=30).content)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert any("forward_backward" in event["name"] for event in spans), [event["name"] for event in spans]


@case("billing: usage")
def usage(world: World) -> None:
    get_usage = need(world.rest, "get_billing_usage")
    assert world.trained is not None
    this_hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hour = timedelta(hours=1)
    events = settle(get_usage(this_hour - hour, this_hour + hour)).data
    session_id = world.service.holder.get_session_id()
    trained = [event for event in events if event.event_info.type == "training" and event.session_id == session_id]
    assert sum(event.event_info.token_count for event in trained) > 0, events


@case("billing: what the checkpoints take")
def storage(world: World) -> None:
    get_storage = need(world.rest, "get_current_checkpoint_storage_usage")
    assert world.saved_state
    found = settle(get_storage()).data
    assert sum(item.checkpoint_count for item in found) > 0, found
    assert sum(item.size_bytes for item in found) > 0, found


@case("audit log")
def audit(world: World) -> None:
    get_log = need(world.rest, "get_audit_log")
    path = world.saved_state
    settle(world.service.create_training_client_from_state(path))
    assert path in [entry.tinker_path for entry in settle(get_log()).entries], "the load is not in the log"


@case("whoami")
def whoami(world: World) -> None:
    """Read from the JWT that the SDK was given for its key."""
    ask = need(world.rest, "whoami")
    if not world.service.holder._client_config.pjwt_auth_enabled:
        raise Absent
    assert settle(ask()).user_urn


@case("the command line: run list, run info")
def command_runs(world: World) -> None:
    run_id = world.trained.model_id
    assert run_id in tinker_command(world, "run", "list"), "the run is not listed"
    assert world.base_model in tinker_command(world, "run", "info", run_id)


@case("the command line: checkpoint list, checkpoint info")
def command_checkpoints(world: World) -> None:
    run_id, path = world.trained.model_id, world.saved_state
    assert "weights/conformance-state" in tinker_command(world, "checkpoint", "list", "--run-id", run_id)
    assert "weights/conformance-state" in tinker_command(world, "checkpoint", "info", path)


@case("the command line: model list")
def command_models(world: World) -> None:
    _needs_command("model")
    assert world.base_model in tinker_command(world, "model", "list")


@case("the command line: auth status")
def command_auth(world: World) -> None:
    _needs_command("auth")
    tinker_command(world, "auth", "status")


def _needs_command(group: str) -> None:
    has_commands = importlib.util.find_spec("tinker.cli") is not None
    if not has_commands or importlib.util.find_spec(f"tinker.cli.commands.{group}") is None:
        raise Absent


def tinker_command(world: World, *arguments: str) -> str:
    """Its output."""
    program = Path(sys.executable).with_name("tinker")
    if not program.exists():
        raise Absent
    env = {**os.environ, "TINKER_BASE_URL": world.base_url, "TINKER_API_KEY": world.api_key, "COLUMNS": "400"}
    command = [str(program), "--format", "json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"tinker {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout
