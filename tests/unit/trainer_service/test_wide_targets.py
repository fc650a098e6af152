"""Many targets for a token: bounded, counted, and refused before they take memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.batches import datum, request, sparse, wide
from tests.support.models import VOCAB_SIZE
from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tests.unit.trainer_service.engines import create
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.server import MAX_MESSAGE_BYTES
from tinsmith.sizing import Footprint, Lengths
from tinsmith.v1 import trainer_pb2, types_pb2
from trainer_service.engine import batch as module
from trainer_service.engine.batch import BatchLimits, Example
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine, cut
from trainer_service.engine.memory import peak_bytes
from trainer_service.requests import batch_of

LIMITS = BatchLimits(vocab_size=100, max_context_length=64)
WIDE = 64 * 1024 * 1024
"""Columns whose int64 cells take 512 MiB."""
SMALL_BYTES = 4 * 1024 * 1024


@contextmanager
def takes_little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < SMALL_BYTES


def test_too_many_columns_are_refused_with_their_number_and_the_limit_before_they_take_memory() -> None:
    message = request([wide(WIDE)])
    assert message.ByteSize() < 300
    with takes_little_memory(), pytest.raises(InvalidRequest, match=r"67108864 targets for a token.*1024") as caught:
        batch_of(message, LIMITS)
    assert caught.value.metadata["field"] == "data[0].loss_fn_inputs.target_tokens"
    assert "data[0].loss_fn_inputs.target_tokens" in caught.value.message
    assert "max_targets_per_token" in caught.value.message


def test_dense_targets_have_the_same_limit() -> None:
    limits = BatchLimits(vocab_size=100, max_context_length=64, max_targets_per_token=2)
    batch_of(request([datum([1], target_tokens=np.zeros((1, 2), np.int64))]), limits)
    with pytest.raises(InvalidRequest, match="3 targets for a token are above this server's max_targets_per_token 2"):
        batch_of(request([datum([1], target_tokens=np.zeros((1, 3), np.int64))]), limits)


def test_weights_of_another_shape_than_their_targets_are_refused_before_they_take_memory() -> None:
    with takes_little_memory(), pytest.raises(InvalidRequest, match=r"shape \[1, 67108864\] is not that of target"):
        batch_of(request([wide(2, weights=WIDE)]), LIMITS)


def custom(*data: types_pb2.Datum) -> trainer_pb2.ForwardBackwardRequest:
    """A loss that reads `table`."""
    message = request(data, "custom")
    calls = [node("placeholder", "table", "table"), node("call_method", "total", "sum", ref("logprobs"))]
    total = graph(*calls, loss="total")
    message.custom_loss.CopyFrom(custom_loss(total, {"logprobs": 1, "table": 2}))
    return message


def test_a_sparse_input_of_a_custom_loss_is_no_larger_than_a_node_may_be_and_refused_before_it_takes_memory() -> None:
    one = datum([1], target_tokens=[2])
    one.loss_fn_inputs["table"].CopyFrom(sparse(1, WIDE, dtype=types_pb2.DTYPE_FLOAT32))
    with takes_little_memory(), pytest.raises(InvalidRequest, match=r"\.table: .*268435456 bytes.*67108864"):
        batch_of(custom(one), LIMITS)


def test_a_request_whose_answer_would_be_no_message_is_refused_as_a_whole_before_it_takes_memory() -> None:
    limits = BatchLimits(vocab_size=100, max_context_length=64, max_targets_per_token=2**23)
    data = [wide(2**23) for _ in range(9)]  # 32 MiB of logprobs each
    with takes_little_memory(), pytest.raises(InvalidRequest, match=f"data: .*75497472 targets.*{MAX_MESSAGE_BYTES}"):
        batch_of(request(data), limits)


def test_dense_targets_whose_answer_would_be_no_message_are_refused() -> None:
    one = datum([1] * 64, target_tokens=np.zeros((64, 1024), np.int64))
    message = request([one] * (MAX_MESSAGE_BYTES // (4 * 64 * 1024)))
    with pytest.raises(InvalidRequest, match="in its answer"):
        batch_of(message, LIMITS)


def datums_of(*shapes: tuple[int, ...]) -> list[types_pb2.Datum]:
    return [datum([1] * shape[0], target_tokens=np.zeros(shape, np.int64)) for shape in shapes]


def test_a_datum_is_charged_for_its_targets_and_weights_and_with_one_target_for_its_tokens_alone() -> None:
    batch = batch_of(request(datums_of((8,), (8, 1), (8, 33), (8, 1000))), LIMITS)
    assert [one.length for one in batch.datums] == [8, 8, 8, 8]
    assert [one.charge for one in batch.datums] == [8, 8, 8 + 4, 8 + 2 * 8 * 999 // 128 + 1]


def test_a_datum_is_charged_for_what_a_custom_loss_reads() -> None:
    one = datum([1], target_tokens=[2], table=np.zeros((64, 128), np.float32))
    (read,) = batch_of(custom(one), LIMITS).datums
    assert read.charge == 1 + 64


def test_turns_and_the_token_budget_go_by_what_is_charged() -> None:
    batch = batch_of(request(datums_of((8, 33), (8,), (8, 33))), LIMITS)
    assert batch.costs == [12, 8, 12]
    assert batch.num_waiting_tokens == 32
    items = [Example(batch, index) for index in range(3)]
    assert [len(part) for part in cut(items, lambda: 20, lambda _: True)] == [2, 1]
    assert [len(part) for part in cut(items, lambda: 19, lambda _: True)] == [1, 1, 1]


def test_a_datum_with_more_targets_than_memory_allows_is_refused_by_what_it_is_charged(base: BaseModel) -> None:
    engine = TrainingEngine(base, max_tokens_per_microbatch=64)
    engine.follow(Plan(token_budget=64, longest_datum=100))
    batch_of(request(datums_of((8, 700))), engine.limits)
    with pytest.raises(InvalidRequest, match=r"\[8, 800\], count as 108 tokens.*100, what fits into .* memory"):
        batch_of(request(datums_of((8, 800))), engine.limits)
    loose = TrainingEngine(base, max_tokens_per_microbatch=64)
    loose.follow(Plan(token_budget=64, longest_datum=10**9))
    batch_of(request(datums_of((8, 800))), loose.limits)


def test_the_charged_memory_covers_that_of_many_targets(base: BaseModel) -> None:
    """On the smallest model that the tests have, whose tokens take least."""
    engine = TrainingEngine(base, max_tokens_per_microbatch=512)
    create(engine, "m")

    def peak(columns: int) -> int:
        shape = (64, columns)
        targets = torch.randint(VOCAB_SIZE, shape).numpy()
        message = request([datum([1] * 64, target_tokens=targets, weights=np.ones(shape, np.float32))])
        one = replace(batch_of(message, engine.limits), model_id="m")

        def whole() -> None:
            engine.passes.once(one, checkpointing=False)

        whole()
        tracemalloc.start()  # arrays are torch's on the device, and numpy's on the host
        try:
            tensors = peak_bytes(base.device, whole)
            return tensors + tracemalloc.get_traced_memory()[1] + sum(array.nbytes for array in one.logprobs)
        finally:
            tracemalloc.stop()

    def peak_of_probe(lengths: Lengths) -> int:
        return peak_bytes(base.device, lambda: engine.probe("m", lengths, checkpointing=False))

    footprint = Footprint.measured(peak_of_probe, 64)
    more = module.charge_of(64, [64 * 1024, 64 * 1024]) - 64
    assert peak(1024) - peak(1) <= more * footprint.bytes_per_token
