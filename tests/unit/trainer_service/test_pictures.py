"""Pictures in training: counted, refused by name, computed as transformers does, and replayed after a crash."""

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.support.batches import datum, request
from tests.support.models import VISION, image_processor, make_vision_model
from tests.support.parameters import fast_ones
from tests.unit.trainer_service.restoring import Process
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import Adapter, AdapterConfig
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.tower import PictureFeatures, PlacedPicture, Tower
from tinsmith.rpc.tensors import from_numpy
from tinsmith.v1 import trainer_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import Batch, BatchLimits, Datum, Output
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.measure import Bounds, measure
from trainer_service.engine.memory import peak_bytes
from trainer_service.engine.passes import Passes
from trainer_service.intake import _is_large
from trainer_service.objectives.losses import LOSS_FNS
from trainer_service.ranks.follower import Follower
from trainer_service.ranks.wire import Message
from trainer_service.request_bytes import batch_bytes
from trainer_service.requests import batch_of

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
    return BatchLimits(vocab_size=256, max_context_length=64, processor=seeing.tower and seeing.tower.processor)


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
    blind = replace(limits, processor=None, why_no_pictures="its files hold no image processor")
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


def engine_of(base: BaseModel, plan: Plan | None = None, **config: Any) -> TrainingEngine:
    """An engine with the models "adapts", with layers of the tower, and "frozen", whose tower is frozen."""
    engine = TrainingEngine(base, max_tokens_per_microbatch=100)
    if plan is not None:
        engine.follow(plan)
    for model_id in ("adapts", "frozen"):
        engine.create_model(model_id, AdapterConfig(4, seed=1, train_vision=model_id == "adapts", **config), "adamw")
        with torch.no_grad():
            for weights in engine.models[model_id].adapter.weights.values():  # type: ignore[union-attr]
                weights.b_O_R.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    return engine


def seen(number: int) -> types_pb2.Datum:
    """A datum of 20 tokens, 15 of them of a picture that has this number."""
    return with_chunks(text(1, 2), chunk(Image.fromarray(PIXELS[number:][:21, :37])), text(3, 4, 9), targets=20)


def micro_batches(engine: TrainingEngine, model_id: str, data: list[types_pb2.Datum]) -> list[int]:
    """Number of datums of each micro-batch of a batch."""
    with pytest.MonkeyPatch.context() as patch:
        found, usual = [], Passes.run
        patch.setattr(Passes, "run", lambda self, one: (found.append(len(one[0][1])), usual(self, one)))
        (output,) = engine.forward_backward([(model_id, batch_of(request(data), engine.limits))])
    assert isinstance(output, Output), output
    return found


@pytest.mark.parametrize("family", fast_ones(["Qwen3VL", "Gemma3", "Gemma4"], ["Gemma3"]))
def test_memory_of_pictures_in_an_adapted_tower_is_predicted_from_two(family: str, tmp_path: Path) -> None:
    base = BaseModel.load(make_vision_model(tmp_path, family), device=torch.device("cpu"), dtype=torch.float32)
    engine = TrainingEngine(base, max_tokens_per_microbatch=512)
    # With so little memory the trainer measures activation checkpointing, too.
    plan = measure(engine, Bounds(512, max_lora_rank=16, token_budget=0, memory_bytes=3_000_000))
    assert engine.models == {}
    engine.create_model("m", AdapterConfig(16, seed=1, train_vision=True), "adamw")
    assert base.tower is not None
    placed = base.tower.examples(5)[-1]
    length = placed.stop + 10
    for footprint, checkpointing in ((plan.plain, False), (plan.checkpointed, True)):
        assert footprint is not None
        peak, text_alone = (
            peak_bytes(
                base.device,
                lambda c=checkpointing, n=count: engine.probe("m", [length], checkpointing=c, num_pictures=n),
            )
            for count in (5, 0)
        )
        planned = footprint.of([length + math.ceil(plan.picture_cost * placed.stop)])
        assert peak > 1.2 * text_alone  # no plan counted the difference
        assert 0.9 * peak < planned
        assert checkpointing or planned < 1.2 * peak


def test_pictures_in_an_adapted_tower_make_micro_batches_smaller(seeing: BaseModel) -> None:
    engine = engine_of(seeing, Plan(100, picture_cost=2.0))
    data = [seen(number) for number in range(4)]
    assert micro_batches(engine, "frozen", data) == [4]
    assert micro_batches(engine, "adapts", data) == [2, 2]  # 20 + 2 x 15 tokens each
    assert micro_batches(engine, "adapts", [seen(0)] * 4) == [3, 1]  # a picture is encoded once: 50 + 20 + 20 tokens
    assert micro_batches(engine, "adapts", [with_chunks(text(*range(20)), targets=20)] * 5) == [5]


def test_equal_pictures_of_two_datums_are_charged_once(limits: BatchLimits) -> None:
    message = request([seen(0), seen(0), seen(1), datum([1, 2], target_tokens=[2, 3])])
    one = batch_of(message, limits)
    one.charge_pictures(1.5)
    assert one.charges == one.costs == [43, 43, 43, 2]
    assert one.shared == [0, 22, 0, 0]
    assert one.num_waiting_tokens == one.charge(range(4)) == 43 + 21 + 43 + 2
    shared = replace(limits, share_prefixes=True)
    two = batch_of(message, shared)
    before = list(two.shared)
    two.charge_pictures(1.5)
    assert [now - then for now, then in zip(two.shared, before, strict=True)] == [0, 22, 0, 0]


def test_every_rank_charges_alike(seeing: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that disagreed would divide the datums of a micro-batch in different ways."""
    engine = engine_of(seeing, Plan(100, picture_cost=2.0))
    message = request([seen(0), seen(0), seen(1)], model_id="adapts")
    ours = batch_of(message, engine.limits)
    engine.passes.charge(ours)
    group: Any = SimpleNamespace(place=SimpleNamespace(num_rows=2, tensor_parallel=1))
    follower = Follower(seeing, group, max_tokens_per_microbatch=100)
    monkeypatch.setattr(follower, "_engine", engine)
    body = torch.frombuffer(bytearray(message.SerializeToString()), dtype=torch.uint8)
    for new, tensors in (([(1, "adapts")], [body]), ([], [])):  # the second micro-batch is of the same batch
        fields = {"ended": [], "new": new, "micro_batch": [(1, [0, 1, 2])]}
        ((theirs, _),) = follower._micro_batch(Message("run", fields, tensors))
        assert theirs.charges == ours.charges == [50, 50, 50]
        assert theirs.shared == ours.shared
        assert ours.shared[1] >= 30


def test_pictures_that_can_never_fit_are_refused_where_the_tower_is_adapted(seeing: BaseModel) -> None:
    engine = engine_of(seeing, Plan(100, longest_datum=60, picture_cost=3.0))
    message = request([datum([1, 2], target_tokens=[2, 3]), seen(0)])
    for model_id in ("frozen", "adapts"):
        (result,) = engine.forward_backward([(model_id, batch_of(message, engine.limits))])
        assert isinstance(result, Output) == (model_id == "frozen")
    assert isinstance(result, InvalidRequest)
    assert str(result) == (
        "data[1].model_input: its 20 tokens count as 65 with the activations of its pictures in the tower, which this "
        "run adapts; this is above 60, what fits into this trainer's memory"
    )
    assert engine.is_tainted("adapts")


@pytest.mark.parametrize("family", fast_ones(VISION, ["Qwen3_5", "Gemma4"]))
def test_a_tower_that_runs_out_of_memory_runs_in_halves_and_then_with_checkpointing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = BaseModel.load(make_vision_model(tmp_path, family), device=torch.device("cpu"), dtype=torch.float32)
    assert base.tower is not None
    tower, usual, passes = base.tower, Tower.features_of, []
    one = replace(base.tower.examples(1)[0], start=2)
    tokens = [1, 2, *[5] * one.picture.num_tokens, 3]
    number = len(tokens)
    inputs = {"weights": np.ones(number, np.float32)}
    others = [replace(one, picture=tower.processor.of_pixels(np.full_like(one.picture.pixels, n))) for n in range(2)]
    datums = [Datum(np.array(tokens, np.int32), np.arange(number), inputs, (other,)) for other in others]
    batch = Batch("cross_entropy", LOSS_FNS["cross_entropy"], {}, forward_only=False, datums=datums)

    def features_of(self: Tower, placed: Sequence[PlacedPicture], *args: Any, **kwargs: Any) -> PictureFeatures:
        checkpointed = self.layers[0].__dict__.get("forward") is not before
        passes.append((len(placed), checkpointed))
        if len(placed) > 1 or not checkpointed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(self, placed, *args, **kwargs)

    before = tower.layers[0].__dict__.get("forward")
    engine = engine_of(base, Plan(10_000))
    engine.forward_backward([("adapts", batch)])
    expected = engine.models["adapts"].need_gradient().flat.clone()
    engine.models["adapts"].clear_gradient()
    calls = [0]
    next(tower.layers[0].children()).register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    monkeypatch.setattr(Tower, "features_of", features_of)
    (output,) = engine.forward_backward([("adapts", batch)])
    assert isinstance(output, Output), output
    assert passes == [(2, False), (1, False), (1, True), (1, False), (1, True)]
    assert calls[0] == 4  # each picture's layer is computed again in backward
    found = engine.models["adapts"].need_gradient().flat
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    vision = [target.name for target in base.targets if target.group == "vision"]
    assert all(engine.models["adapts"].need_gradient().weights[name].b_O_R.abs().sum() > 0 for name in vision)


def test_a_run_that_adapts_the_tower_alone_takes_text_without_pictures(seeing: BaseModel) -> None:
    engine = engine_of(seeing, train_attn=False, train_mlp=False, train_unembed=False)
    engine.forward_backward([("adapts", batch_of(request([seen(0)]), engine.limits))])
    before = engine.models["adapts"].need_gradient().flat.clone()
    data = [with_chunks(text(1, 2, 3), targets=3)]
    (output,) = engine.forward_backward([("adapts", batch_of(request(data), engine.limits))])
    assert isinstance(output, Output), output
    assert torch.equal(engine.models["adapts"].need_gradient().flat, before)
    assert before.abs().sum() > 0


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
    seen = image_processor(folder)(images=[WIDE], return_tensors="pt")
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
