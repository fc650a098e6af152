"""Datums that begin alike are computed once, with the results and gradients of datums that are computed apart."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import CollectorRegistry

from tests.support.batches import datum, request
from tests.support.models import VOCAB_SIZE, make_vision_model
from tests.unit.trainer_service.engines import assert_near, create, gradient, run
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import Batch
from trainer_service.engine.engine import TrainingEngine
from trainer_service.metrics import Metrics
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.requests import batch_of
from trainer_service.scheduling.packing import DeficitRoundRobin

PROMPT, TURN = 40, 33


def like(tokens: Sequence[int], seed: int, loss_fn: str) -> types_pb2.Datum:
    """A datum with these tokens, and random targets and other inputs."""
    rng = np.random.default_rng(seed)
    length = len(tokens)
    inputs: dict[str, object] = {"target_tokens": rng.integers(VOCAB_SIZE, size=length)}
    if loss_fn == "cross_entropy":
        inputs["weights"] = rng.normal(size=length).astype(np.float32)
        return datum(tokens, **inputs)
    inputs["logprobs"] = rng.normal(-np.log(VOCAB_SIZE), 0.3, length).astype(np.float32)
    inputs["advantages"] = rng.normal(size=length).astype(np.float32)
    one = datum(tokens, **inputs)
    for mask in {"sequence_ratio_mask", "sampled_mask"} & {*LOSS_FNS[loss_fn].required}:
        one.loss_fn_inputs[mask].CopyFrom(from_numpy(np.ones(length, np.float32)))
    return one


def groups() -> list[list[int]]:
    """Samples of two prompts, turns of a conversation, a datum twice, and one that shares nothing; not in order."""
    rng = np.random.default_rng(7)
    new = lambda length: rng.integers(VOCAB_SIZE, size=length).tolist()  # noqa: E731
    prompts = [new(PROMPT), new(PROMPT)]
    samples = [prompts[n % 2] + new(length) for n, length in enumerate((9, 5, 9, 5, 17, 1))]
    talk = [prompts[0] + new(TURN)]
    talk.append(talk[0] + new(TURN))
    talk += [talk[1] + new(3), talk[1] + new(3)]
    return [*samples, *talk, samples[0], new(11), prompts[1]]


def batch(engine: TrainingEngine, loss_fn: str, sequences: Sequence[list[int]]) -> Batch:
    data = [like(tokens, seed, loss_fn) for seed, tokens in enumerate(sequences)]
    return batch_of(request(data, loss_fn), engine.limits)


def engines(base: BaseModel) -> tuple[TrainingEngine, TrainingEngine, CollectorRegistry]:
    """An engine that shares beginnings, one that does not, and the registry of the first one's metrics."""
    registry = CollectorRegistry()
    return (
        TrainingEngine(base, max_tokens_per_microbatch=4096, metrics=Metrics(registry)),
        TrainingEngine(base, max_tokens_per_microbatch=4096, share_prefixes=False),
        registry,
    )


def shared(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("trainer_shared_tokens_total")


@pytest.mark.parametrize("loss_fn", LOSS_FNS)
def test_results_and_gradients_are_those_of_datums_apart(base: BaseModel, loss_fn: str) -> None:
    sharing, apart, registry = engines(base)
    for engine in (sharing, apart):
        create(engine, "m")
    ours, theirs = (run(engine, "m", batch(engine, loss_fn, groups())) for engine in (sharing, apart))
    assert (shared(registry) or 0) > 300
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    for key, value in theirs.metrics.items():
        assert ours.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
    assert_near(gradient(sharing, "m"), gradient(apart, "m"), 1e-5)


def test_a_micro_batch_has_a_whole_group_where_its_tokens_would_not_fit_apart(base: BaseModel) -> None:
    sharing, apart, registry = engines(base)
    rng = np.random.default_rng(3)
    prompt = rng.integers(VOCAB_SIZE, size=200).tolist()
    sequences = [prompt + rng.integers(VOCAB_SIZE, size=10).tolist() for _ in range(32)]
    one = batch(sharing, "cross_entropy", sequences)
    assert one.charge(range(32)) == 210 + 31 * 10
    assert batch(apart, "cross_entropy", sequences).charge(range(32)) == 32 * 210
    assert one.charge([0, 1, 5, 6]) == 2 * (210 + 10)  # each of the two is computed from the beginning
    ring = DeficitRoundRobin()
    ring.add(one)
    assert ring.next_micro_batch(600) == [(one, range(32))]
    ring.add(two := batch(sharing, "cross_entropy", sequences))
    assert ring.next_micro_batch(410) == [(two, range(21))]
    assert ring.next_micro_batch(410) == [(two, range(21, 32))]
    create(sharing, "m")
    run(sharing, "m", one)
    assert shared(registry) == 31 * 200


def test_models_share_nothing_with_each_other(base: BaseModel) -> None:
    sharing, apart, _ = engines(base)
    for engine in (sharing, apart):
        for name in ("a", "b"):
            create(engine, name)
            with torch.no_grad():
                engine.models[name].adapter.flat.mul_(1 + ord(name) / 100)
        works = [(name, batch(engine, "cross_entropy", groups())) for name in ("a", "b")]
        engine.forward_backward(works)
    for name in ("a", "b"):
        assert_near(gradient(sharing, name), gradient(apart, name), 1e-5)


def test_forward_only_shares_too(base: BaseModel) -> None:
    sharing, apart, registry = engines(base)
    outputs = []
    for engine in (sharing, apart):
        create(engine, "m")
        data = [like(tokens, seed, "cross_entropy") for seed, tokens in enumerate(groups())]
        outputs.append(run(engine, "m", batch_of(request(data, forward_only=True), engine.limits)))
    assert (shared(registry) or 0) > 300
    for mine, other in zip(*(output.logprobs for output in outputs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_a_batch_without_common_beginnings_has_the_same_bits(base: BaseModel) -> None:
    sharing, apart, registry = engines(base)
    sequences = [np.random.default_rng(n).integers(VOCAB_SIZE, size=50).tolist() for n in range(6)]
    for engine in (sharing, apart):
        create(engine, "m")
        run(engine, "m", batch(engine, "cross_entropy", sequences))
    assert shared(registry) == 0
    assert torch.equal(gradient(sharing, "m"), gradient(apart, "m"))


@pytest.mark.parametrize("family", ["Qwen3VL", "Gemma3"])
def test_a_picture_is_shared_with_the_same_picture_only(family: str, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path, family)
    base = BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)
    sharing, apart, registry = engines(base)
    pixels = np.random.default_rng(0).integers(256, size=(96, 96, 3), dtype=np.uint8)
    pictures = [picture(pixels), picture(255 - pixels)]
    num_tokens = 9 if family == "Gemma3" else 25
    data = []
    for one, end in ((0, (7, 8)), (0, (9,)), (0, (6,)), (0, (5, 1)), (0, (4,)), (1, (7, 8))):
        chunks = [datum(range(10)).model_input[0], pictures[one], datum(list(end)).model_input[0]]
        length = 10 + num_tokens + len(end)
        targets = from_numpy(np.arange(length) % 200)
        data.append(types_pb2.Datum(model_input=chunks, loss_fn_inputs={"target_tokens": targets}))
    outputs = []
    for engine in (sharing, apart):
        create(engine, "m")
        outputs.append(run(engine, "m", batch_of(request(data), engine.limits)))
    assert shared(registry) == 5 * 10 + 4 * num_tokens
    for mine, other in zip(*(output.logprobs for output in outputs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    assert_near(gradient(sharing, "m"), gradient(apart, "m"), 1e-5)


def picture(pixels: np.ndarray) -> types_pb2.Chunk:
    """25 tokens in Qwen3VL: the processor scales it to 5 x 5 squares."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return types_pb2.Chunk(image=types_pb2.Image(data=file.getvalue(), format="png"))
