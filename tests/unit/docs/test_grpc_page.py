"""docs/grpc.md says what the code has: its tables, its numbers, its graph and its loop."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tinsmith.rpc import channel, errors, server
from tinsmith.v1 import metrics_pb2, sampler_pb2, trainer_admin_pb2, trainer_pb2, weight_sync_pb2
from trainer_service.config import TrainerConfig
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.requests import loss_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "grpc.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table behind a heading."""
    table = PAGE[PAGE.index(f"# {heading}\n") :].partition("\n|")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_error_stands_beside_its_code() -> None:
    found = {
        (code.strip("`"), reason)
        for code, reasons, *_ in rows("Errors")
        for reason in re.findall(r"[A-Z_]{4,}", reasons)
    }
    expected = {(kind.code, kind.reason) for kind in errors._BY_REASON.values()}
    assert found == expected


def test_every_loss_has_its_settings_and_their_defaults() -> None:
    found = {
        name: {key: float(number) for key, number in re.findall(r"`(\w+)` \(([\d.]+)\)", settings)}
        for names, _, settings in rows("Losses")
        for name in re.findall(r"`(\w+)`", names)
    }
    assert found.pop("custom") == {}
    assert found == {name: dict(loss.config) for name, loss in LOSS_FNS.items()}


@pytest.mark.parametrize("name", LOSS_FNS)
def test_every_array_of_a_loss_is_named(name: str) -> None:
    arrays = {names.strip("`"): described for names, described, *_ in rows("Losses")}
    told, row = arrays["each"], arrays[name]
    while row:
        told += row
        other = re.match(r"as `(\w+)`", row)
        row = arrays["importance_sampling"] if row.startswith("likewise") else arrays[other[1]] if other else ""
    assert set(LOSS_FNS[name].arrays) <= set(re.findall(r"`(\w+)`", told))


def test_every_service_is_in_the_table() -> None:
    found = {name for cell, *_ in rows("gRPC clients") for name in re.findall(r"`(\w+)`", cell)}
    files = (metrics_pb2, sampler_pb2, trainer_admin_pb2, trainer_pb2, weight_sync_pb2)
    assert found == {name for file in files for name in file.DESCRIPTOR.services_by_name}


def test_the_graph_of_the_page_is_minus_the_sum_of_the_logprobs() -> None:
    text = PAGE[PAGE.index('    {"format": 1, "nodes": [\n') :].partition("\n\n")[0]
    inputs = [trainer_pb2.CustomLossInput(name="logprobs", rank=1)]
    loss = loss_of(trainer_pb2.CustomLoss(name="page", inputs=inputs, graph=json.dumps(json.loads(text))))
    value, metrics = loss.graph.run([torch.tensor([-1.0, -2.5])], before=lambda node: None, after=lambda result: None)
    assert (float(value), metrics) == (3.5, {})


def test_the_numbers_of_the_page_are_the_defaults() -> None:
    defaults = {name: field.default for name, field in TrainerConfig.model_fields.items()}
    assert f"`TRAINER_MAX_QUEUED_OPERATIONS` ({defaults['max_queued_operations']})" in " ".join(PAGE.split())
    assert "`TRAINER_RESULT_RETENTION_S` (an hour)" in PAGE
    assert defaults["result_retention_s"] == 3600
    assert f"up to {server.MAX_MESSAGE_BYTES // 2**20} MiB" in PAGE
    assert f"metadata** `{': '.join(server.ACCEPTED)}`" in PAGE
    assert f"every {dict(channel._OPTIONS)['grpc.keepalive_time_ms'] // 1000} s is enough" in PAGE


def test_the_tokens_of_the_page_are_what_it_says() -> None:
    (text,) = set(re.findall(r'"tokens": "([^"]+)"', PAGE))
    assert np.frombuffer(base64.b64decode(text), "<i4").tolist() == [5, 6]


@pytest.mark.parametrize(
    ("client", "pattern"), [("node/client.js", r"grpc\.status\.([A-Z_]+)"), ("go/client.go", r"codes\.(\w+)")]
)
def test_the_examples_repeat_what_the_loop_of_the_page_repeats(client: str, pattern: str) -> None:
    loop = PAGE[PAGE.index("    operate(method, request):") :].partition("\n\n")[0]
    told = {
        name for line in loop.split("\n") if line.strip().startswith("on ") for name in re.findall(r"[A-Z_]{8,}", line)
    }
    source = (ROOT / "examples/grpc" / client).read_text()
    words = {
        re.sub("(?<=[a-z])(?=[A-Z])", "_", name).upper().replace("CANCELED", "CANCELLED")
        for name in re.findall(pattern, source)
    }
    assert words - {"CODE"} == told
