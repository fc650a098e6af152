"""Pictures in training: counted, refused by name, computed as transformers does, and replayed after a crash."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.support.batches import datum, request
from tests.support.models import make_vision_model
from tests.unit.trainer_service.restoring import Process
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.base_model import BaseModel
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import BatchLimits
from trainer_service.intake import _is_large
from trainer_service.requests import batch_bytes, batch_of

PIXELS = np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)
WIDE = Image.fromarray(PIXELS[:21, :37])
"""15 tokens: 5 x 3 squares of 8 x 8 pixels."""
MODEL = "s:train:0"
ADAM = pb.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def seeing(folder: Path) -> BaseModel:
    return BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def limits(seeing: BaseModel) -> BatchLimits:
    return BatchLimits(vocab_size=256, max_context_length=64, tower=seeing.tower)


def chunk(image: Image.Image = WIDE, file_format: str = "png", **fields: Any) -> types_pb2.Chunk:
    file = io.BytesIO()
    image.save(file, file_format)
    return types_pb2.Chunk(image=types_pb2.Image(**{"data": file.getvalue(), "format": file_format, **fields}))


def text(*tokens: int) -> types_pb2.Chunk:
    return datum(tokens).model_input[0]


def with_chunks(*chunks: types_pb2.Chunk, targets: int, **inputs: Any) -> types_pb2.Datum:
    fields = {"target_tokens": np.arange(targets) % 200, **inputs}
    return types_pb2.Datum(
        model_input=chunks, loss_fn_inputs={name: from_numpy(np.asarray(value)) for name, value in fields.items()}
    )


def test_a_picture_counts_as_its_tokens_and_its_targets_are_ignored_by_default(limits: BatchLimits) -> None:
    one = with_chunks(text(1, 2), chunk(expected_tokens=15), text(3, 4, 9), targets=20)
    message = request([one, datum([1, 2], target_tokens=[2, 3])])
    first, second = batch_of(message, limits).datums
    assert first.length == first.charge == 20
    assert first.tokens_N.tolist() == [1, 2, *[5] * 15, 3, 4, 9]
    (placed,) = first.pictures
    assert (placed.start, placed.picture.num_tokens, placed.picture.grid) == (2, 15, (3, 5))
    # Position 1 would have to predict the picture's first token, and position 16 predicts the text after it.
    assert first.inputs["weights"].tolist() == [1, *[0] * 15, 1, 1, 1, 1]
    assert second.inputs["weights"].tolist() == [1, 1]
    assert not second.pictures
    (first,) = batch_of(request([with_chunks(chunk(), text(1), targets=16)]), limits).datums
    assert first.inputs["weights"].tolist() == [*[0] * 14, 1, 1]
    weights = np.arange(20, dtype=np.float32)
    one = with_chunks(text(1, 2), chunk(), text(3, 4, 9), targets=20, weights=weights)
    (first,) = batch_of(request([one]), limits).datums
    assert first.inputs["weights"].tolist() == weights.tolist()  # those that are sent are applied


@pytest.mark.parametrize(
    ("bad", "field", "message"),
    [
        (chunk(expected_tokens=14), ".expected_tokens", "expected 14 tokens, got 15 from image"),
        (chunk(data=b"\x89PNG\r\n\x1a\nxxxxxxxx"), ".data", "its PNG header is cut off"),
        (chunk(data=b""), ".data", "is no png file: it is empty"),
        (chunk(data=chunk().image.data[:90]), ".data", "is broken"),
        (chunk(format="gif"), ".format", "'gif' is not one of png, jpeg"),
        (chunk(Image.new("RGB", (401, 2))), ".data", "one side may be at most 200 times the other"),
        (
            chunk(override_dimensions=types_pb2.ImageDimensions(width=8, height=9)),
            ".override_dimensions",
            "8 x 9 cannot be applied",
        ),
        (types_pb2.Chunk(dmel=types_pb2.Dmel(dmel=b"x")), "", "chunk kind 'dmel' is not supported here"),
        (types_pb2.Chunk(), "", "chunk kind 'unset' is not supported here"),
    ],
)
def test_a_picture_that_cannot_be_taken_is_refused_by_its_chunk(
    limits: BatchLimits, bad: types_pb2.Chunk, field: str, message: str
) -> None:
    good = with_chunks(text(1), chunk(), targets=16)
    with pytest.raises(InvalidRequest, match=message) as refused:
        batch_of(request([good, with_chunks(text(1), chunk(), bad, targets=31)]), limits)
    assert refused.value.metadata["field"] == f"data[1].model_input[2]{field}"


def test_pictures_are_refused_with_the_reason_where_the_base_model_takes_none(limits: BatchLimits) -> None:
    blind = replace(limits, tower=None, why_no_pictures="its files hold no image processor")
    message = r"'image' is not supported by this base model \(its files hold no image processor\); use encoded_text"
    with pytest.raises(InvalidRequest, match=message) as refused:
        batch_of(request([with_chunks(text(1), chunk(), targets=16)]), blind)
    assert refused.value.metadata["field"] == "data[0].model_input[1]"


def test_a_datum_is_as_long_as_its_pictures(limits: BatchLimits) -> None:
    with pytest.raises(InvalidRequest, match=r"data.0..model_input: 76 tokens, with .* above 64"):
        batch_of(request([with_chunks(*[chunk()] * 5, text(1), targets=76)]), limits)
    with pytest.raises(InvalidRequest, match=r"target_tokens: shape \[3\] must be \[16\]"):
        batch_of(request([with_chunks(chunk(), text(1), targets=3)]), limits)


def test_scaled_pictures_are_counted_as_memory_before_they_are_decoded(limits: BatchLimits) -> None:
    white = chunk(Image.new("RGB", (4000, 4000)))  # 16 kB, scaled to 32 tokens
    message = request([with_chunks(text(1), white, chunk(format="jpeg"), targets=32)])
    plain, counted = batch_bytes(message), batch_bytes(message, limits.counting)
    assert 32 * 64 * 3 * 0.7 < counted - plain < 32 * 64 * 3 + 2048  # the second one is no JPEG, and adds nothing
    with pytest.raises(InvalidRequest, match="this server allows 9000 for one request"):
        batch_of(message, limits, max_bytes=9000)
    assert _is_large(request([with_chunks(chunk(), targets=15)]))
    assert not _is_large(request([datum([1])]))


async def start(folder: Path, base: BaseModel) -> Process:
    return await Process.start(folder, base)


def batch(seq_id: int, *chunks: types_pb2.Chunk, **fields: Any) -> pb.ForwardBackwardRequest:
    plain = datum([7, 8, 9], target_tokens=[8, 9, 10])
    seen = with_chunks(text(11, 12), *chunks, text(13, 14, 15), targets=20)
    return request([plain, seen], model_id=MODEL, seq_id=seq_id, **fields)


async def test_training_computes_what_transformers_does_and_is_replayed_after_a_crash(
    folder: Path, seeing: BaseModel, tmp_path: Path
) -> None:
    lora = types_pb2.LoraConfig(rank=4, seed=1, train_attn=True, train_mlp=True, train_vision=True)
    process = await start(tmp_path / "first", seeing)
    try:
        await process.send(pb.CreateModelRequest(model_id=MODEL, base_model="tiny", lora_config=lora))
        await process.send(batch(1, chunk()))
        await process.send(batch(2, chunk(data=b"no picture")))
        await process.send(pb.OptimStepRequest(model_id=MODEL, seq_id=3, adam_params=ADAM))
        await process.send(batch(4, chunk(WIDE, "jpeg")))
        await process.send(pb.OptimStepRequest(model_id=MODEL, seq_id=5, adam_params=ADAM))
        await process.send(batch(6, chunk(), forward_only=True))
        answer = await process.outcome(MODEL, 1)
        assert isinstance(answer, pb.WaitResultResponse)
        records = answer.forward_backward.loss_fn_outputs
        flat = np.concatenate([np.frombuffer(one.fields["logprobs"].data, "<f4") for one in records])
        assert answer.forward_backward.metrics["num_tokens:sum"] == 23
        refused = await process.outcome(MODEL, 2)
        assert (
            refused == "data[1].model_input[1].data: the picture is no png file: it begins with 6e 6f 20 70 69 63 74 75"
        )
        assert "data[1].model_input[1].data" in str(await process.outcome(MODEL, 3))
        before = [await process.outcome(MODEL, seq_id) for seq_id in (4, 5, 6)]
        weights = await process.weights(MODEL)
        trained = process.engine.models[MODEL].adapter
        assert isinstance(trained, Adapter)
        for target in trained.targets:
            assert target.group != "vision" or trained.weights[target.name].b_O_R.abs().sum() > 0
        crashed = await process.crash(tmp_path / "second")
    finally:
        await process.stop()
    assert weights["adapter"].abs().sum() > 0

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    seen = AutoImageProcessor.from_pretrained(folder)(images=[WIDE], return_tensors="pt")
    tokens = torch.tensor([[11, 12, *[5] * 15, 13, 14, 15]])
    with torch.no_grad():
        table = model(input_ids=tokens, mm_token_type_ids=(tokens == 5).int(), **seen).logits[0].log_softmax(-1)
    expected = table.gather(1, torch.arange(20)[:, None])[:, 0]
    np.testing.assert_allclose(flat[3:], expected.numpy(), rtol=1e-5, atol=1e-5)

    process = await start(crashed, seeing)
    try:
        again = await process.weights(MODEL)
        assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
        assert [await process.outcome(MODEL, seq_id) for seq_id in (4, 5, 6)] == before
        assert process.num_replayed("forward_backward") > 0
    finally:
        await process.stop()
