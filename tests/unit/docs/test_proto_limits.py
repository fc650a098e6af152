"""The limits that comments in proto/ tell are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sampler_service import grammars, tokenizer
from sampler_service.config import SamplerConfig
from sampler_service.core import request
from tinsmith.pictures import counting, headers
from tinsmith.rpc import errors, notes, tensors
from trainer_service import checkpoint_servicer, servicer
from trainer_service.config import TrainerConfig
from trainer_service.engine.batch import BatchLimits
from trainer_service.objectives import custom_loss, custom_loss_graph
from trainer_service.storage import encryption, imports

PROTO = Path(__file__).parents[3] / "proto/tinsmith/v1"


def default(config: type[TrainerConfig | SamplerConfig], name: str) -> int:
    return config.model_fields[name].default


LIMITS = [
    ("trainer", "ForwardBackwardRequest", "data", "1 to {:,} datums", BatchLimits(1, 1).max_datums),
    ("trainer", "OptimStepRequest", "seq_id", "({:,} unless set)", default(TrainerConfig, "max_queued_operations")),
    ("trainer", "SkipOperationRequest", "reason", "{:,} bytes", errors.MAX_MESSAGE_BYTES),
    ("trainer", "CustomLoss", "inputs", "1 to {}", custom_loss.MAX_INPUTS),
    ("trainer", "CustomLoss", "graph", "1 to {:,} nodes", custom_loss_graph.MAX_NODES),
    ("trainer", "CustomLoss", "graph", "at most {} KiB", custom_loss_graph.MAX_JSON_BYTES // 2**10),
    ("trainer", "CreateModelRequest", "user_metadata", "at most {:,} entries", notes.MAX_ENTRIES),
    ("trainer", "CreateModelRequest", "user_metadata", "{:,} characters", notes.MAX_CHARACTERS),
    ("trainer", "SaveCheckpointRequest", "user_metadata", "at most {:,} entries", notes.MAX_ENTRIES),
    ("trainer", "SaveCheckpointRequest", "user_metadata", "{:,} characters", notes.MAX_CHARACTERS),
    ("trainer", "ImportCheckpointHeader", "user_metadata", "at most {:,} entries", notes.MAX_ENTRIES),
    ("trainer", "ImportCheckpointHeader", "user_metadata", "{:,} characters", notes.MAX_CHARACTERS),
    ("trainer", "ImportCheckpointRequest", "archive", "{:,} files", imports._MAX_MEMBERS),
    ("trainer", "SaveCheckpointRequest", "age_recipients", "at most {}", encryption.MAX_RECIPIENTS),
    ("trainer", "CreateModelRequest", "creation_id", "{} hexadecimal", 2 * servicer._NONCE_BYTES),
    ("trainer", "SaveCheckpointRequest", "save_id", "{} hexadecimal", 2 * servicer._NONCE_BYTES),
    ("trainer", "ReadCheckpointFileResponse", "data", "{} MiB", checkpoint_servicer._PIECE_BYTES // 2**20),
    ("trainer", "ImportCheckpointRequest", "archive", "{} GiB", default(TrainerConfig, "max_import_bytes") // 2**30),
    ("sampler", "SampleRequest", "num_samples", "{:,} unless set", default(SamplerConfig, "max_num_samples")),
    ("sampler", "SampleRequest", "topk_prompt_logprobs", "{} unless set", default(SamplerConfig, "max_topk_logprobs")),
    ("sampler", "SamplingParams", "logit_bias", "at most {:,} tokens", request.MAX_BIASES),
    ("sampler", "StopCondition", "strings", "{:,} bytes", request.MAX_STOP_BYTES),
    ("sampler", "StopCondition", "token_ids", "at most {:,}", request.MAX_STOP_TOKENS),
    ("sampler", "SampleRequest", "version_id", "at most {:,} characters", request.MAX_NAME_CHARACTERS),
    ("sampler", "SampleRequest", "follow_run", "at most {:,} characters", request.MAX_NAME_CHARACTERS),
    ("sampler", "SampleRequest", "cache_salt", "At most {:,} characters", request.MAX_NAME_CHARACTERS),
    ("sampler", "Grammar", "json_schema", "{} KiB", grammars.MAX_TEXT_BYTES // 2**10),
    ("sampler", "Grammar", "lark", "{} KiB", grammars.MAX_TEXT_BYTES // 2**10),
    ("sampler", "TokenizeRequest", "text", "{} MiB", tokenizer.MAX_TEXT_BYTES // 2**20),
    ("types", "Tensor", "shape", "{:,} elements", tensors.MAX_ELEMENTS),
    ("types", "Datum", "loss_fn_inputs", "{:,} unless set", default(TrainerConfig, "max_targets_per_token")),
    ("types", "Image", "data", "{} MiB", headers.MAX_BYTES // 2**20),
    ("types", "Image", "data", "{:,} pixels", headers.MAX_PIXELS),
    ("types", "Image", "data", "at most {} times", counting._MAX_RATIO),
]


def comment(file: str, message: str, field: str) -> str:
    """The comment above a field."""
    text = (PROTO / f"{file}.proto").read_text()
    body = text[text.index(f"\nmessage {message} {{") :].split("\n}\n")[0]
    found = re.search(rf"((?:\n +//[^\n]*)+)\n[^\n/]* {field} = \d", body)
    assert found is not None, field
    return " ".join(line.strip().lstrip("/ ") for line in found[1].split("\n"))


@pytest.mark.parametrize(("file", "message", "field", "words", "limit"), LIMITS)
def test_a_comment_tells_the_limit_of_the_code(file: str, message: str, field: str, words: str, limit: int) -> None:
    assert words.format(limit) in comment(file, message, field)


def test_a_time_is_a_timestamp_or_a_duration() -> None:
    """None is a number, whose unit only its name or its comment would tell. Speeds are numbers per second."""
    numbers = re.compile(r"^ +(?:optional |repeated )?(?:double|float|u?int(?:32|64)) (\w+) = ", re.MULTILINE)
    times = re.compile(r"(?<!_per)(?:^|_)(?:s|ms|us|ns|seconds?|time|timestamp|at|age|delay|timeout|duration|ttl)$")
    found = {name for path in PROTO.glob("*.proto") for name in numbers.findall(path.read_text())}
    assert "tokens_per_second" in found
    assert not {name for name in found if times.search(name)}
