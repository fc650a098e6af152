"""Pictures packed with text, against transformers' own models and processors with stock PEFT."""

import gc
import io
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PaliGemmaConfig

from tests.support.adapters import random_adapter
from tests.support.models import VISION, image_processor, kinds_of, make_model, make_vision_model
from tests.support.oracle import Oracle
from tests.support.parameters import fast_ones
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.capabilities import one_by_one
from tinsmith.modeling.logprobs import target_logprobs
from tinsmith.modeling.peft_import import import_peft
from tinsmith.modeling.tower import PlacedPicture, Tower, positions_with_pictures
from tinsmith.pictures.families import family_of
from tinsmith.pictures.processing import Picture

CPU = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)
WIDE, HIGH = (Image.fromarray(PIXELS[:h, :w]) for w, h in ((37, 21), (17, 30)))
"""Pictures whose sides the processor changes: 5 x 3 and 2 x 4 tokens."""


def load(folder: Path, family: str = "Qwen3VL") -> BaseModel:
    base = BaseModel.load(make_vision_model(folder, family), device=CPU, dtype=torch.float32)
    assert base.tower is not None, base.why_no_pictures
    assert not base.one_by_one
    assert not torch.backends.cudnn.allow_tf32, "on CUDA a convolution cuts pictures into patches"
    return base


def scaled(base: BaseModel, image: Image.Image, expected_tokens: int | None = None) -> Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    assert base.tower is not None
    return base.tower.processor.picture(file.getvalue(), "png", expected_tokens=expected_tokens, field="c")


class Sequence:
    """Pieces of text, by their lengths, and pictures."""

    def __init__(self, base: BaseModel, pieces: list[int | Image.Image], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = [piece for piece in pieces if isinstance(piece, Image.Image)]
        self.placed: list[PlacedPicture] = []
        parts: list[Tensor] = []
        for piece in pieces:
            if isinstance(piece, int):
                parts.append(torch.randint(10, 256, (piece,), generator=generator))
            else:
                picture = scaled(base, piece)
                self.placed.append(PlacedPicture(sum(map(len, parts)), picture))
                parts.append(torch.from_numpy(picture.tokens.astype(np.int64)))
        self.tokens = torch.cat(parts)
        self.factors = torch.randn(len(self.tokens), generator=generator)

    def plain(self, model: torch.nn.Module, folder: Path) -> Tensor:
        """Logprob of each token as the successor of itself, by transformers' own processor and model."""
        more = {}
        if self.images:
            more = dict(image_processor(folder)(images=self.images, return_tensors="pt"))
            more = {name: more[name] for name in more if name not in ("num_crops", "num_patches")}
            more |= kinds_of(getattr(model, "base_model", model).model, self.tokens == 5)
        table = model(input_ids=self.tokens[None], **more).logits[0].log_softmax(-1)
        return table.gather(1, self.tokens[:, None])[:, 0]


def packed(base: BaseModel, sequences: list[Sequence], runs: list[Run]) -> Tensor:
    lengths = [len(one.tokens) for one in sequences]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    placed = [
        replace(one, start=one.start + start)
        for start, sequence in zip(starts, sequences, strict=True)
        for one in sequence.placed
    ]
    tokens = torch.cat([one.tokens for one in sequences])
    assert base.tower is not None
    picture_features = base.tower.features_of(placed, runs) if placed else None
    positions = positions_with_pictures(lengths, placed, base.device)
    hidden = base.hidden_states(tokens.to(base.device), positions, Packed(lengths), runs, picture_features)
    return target_logprobs(base.head, hidden, torch.arange(len(tokens)), tokens, runs)


@pytest.mark.parametrize(
    ("family", "train_vision"),
    [
        *((family, False) for family in VISION),
        *((family, True) for family in ("Qwen3VL", "Qwen3_5", "Gemma3", "Gemma4", "Mistral3", "Llava", "InternVL")),
    ],
)
def test_pictures_packed_with_text_equal_transformers_and_peft_gradients_included(
    family: str, train_vision: bool, tmp_path: Path
) -> None:
    base = load(tmp_path / "model", family)
    adapter = random_adapter(base.targets, seed=2, rank=3, train_vision=train_vision)
    assert any("language_model" not in one.name and one.group != "unembed" for one in adapter.targets) == train_vision
    pieces = [[3, WIDE, 4, HIGH, 2], [7], [WIDE, 1], [2, HIGH, 6], [9]]
    sequences = [Sequence(base, one, seed) for seed, one in enumerate(pieces)]
    factors = torch.cat([one.factors for one in sequences])
    ours = packed(base, sequences, [Run(adapter, slice(0, len(factors)))])
    grads = torch.autograd.grad((ours * factors).sum(), adapter.tensors())

    oracle = Oracle(tmp_path / "model", adapter, tmp_path / "adapter")
    theirs = torch.cat([one.plain(oracle.model, tmp_path / "model") for one in sequences])
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=2e-5)
    imported = import_peft(tmp_path / "adapter", base.targets, {}, base_model="", max_rank=3).adapter
    assert imported.config.train_vision == train_vision
    assert torch.equal(imported.flat, adapter.flat)
    for grad, expected in zip(grads, oracle.gradients(lambda: (theirs * factors).sum()), strict=True):
        assert expected.norm() > 0
        # Gates of recurrent layers round worse: test_recurrent.py compares their kernels in float64.
        assert (grad - expected).norm() <= (5e-5 if base.recurrent else 2e-5) * expected.norm()

    with torch.no_grad():
        apart = [packed(base, [one], [Run(adapter, slice(0, len(one.tokens)))]) for one in sequences]
        torch.testing.assert_close(ours.detach(), torch.cat(apart), rtol=1e-5, atol=2e-5)
        assert base.tower is not None
        if not base.tower.processor.sees_ahead:  # one sequence at a time, such models take no pictures
            slowly = packed(one_by_one(base, "for this test"), sequences, [Run(adapter, slice(0, len(factors)))])
            torch.testing.assert_close(ours.detach(), slowly, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", VISION)
def test_a_model_in_bfloat16_takes_pictures(family: str, tmp_path: Path) -> None:
    base = BaseModel.load(make_vision_model(tmp_path, family), device=CPU, dtype=torch.bfloat16)
    assert base.tower is not None, base.why_no_pictures
    features = base.tower.features_of([PlacedPicture(0, scaled(base, WIDE))]).features_P_F_H
    assert features.dtype == torch.bfloat16
    assert features.isfinite().all()


def test_the_tokens_of_a_picture_see_each_other_in_gemma_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the check at load finds the difference, and so it does for a model that runs one sequence at a time."""
    folder = make_vision_model(tmp_path, "Gemma3")
    with monkeypatch.context() as patch:
        patch.setattr(Tower, "ahead", lambda self, picture_features, num_rows: None)
        causal = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    assert "with pictures, its logprobs differ by" in causal.why_no_pictures
    monkeypatch.setattr("tinsmith.modeling.capabilities._unpackable", lambda config: "a test")
    slow = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    assert slow.one_by_one == "a test"
    assert "with pictures, its logprobs differ by" in slow.why_no_pictures


def test_a_picture_is_encoded_once_and_kept_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load(tmp_path)
    tower = base.tower
    assert tower is not None
    encoded: list[int] = []
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda pictures: encoded.append(len(pictures)) or encode(pictures))
    wide, high = scaled(base, WIDE), scaled(base, HIGH)
    first = tower.features_of([PlacedPicture(2, wide), PlacedPicture(20, high), PlacedPicture(40, scaled(base, WIDE))])
    assert encoded == [2]
    assert torch.equal(first.features_P_F_H[:15], first.features_P_F_H[-15:])
    assert first.rows_P.tolist() == [*range(2, 17), *range(20, 28), *range(40, 55)]
    tower.features_of([PlacedPicture(0, high), PlacedPicture(9, wide)])
    assert encoded == [2]
    monkeypatch.setattr("tinsmith.modeling.tower._KEPT_BYTES", first.features_P_F_H[:15].nbytes)
    monkeypatch.setattr("tinsmith.modeling.tower._PIXELS_AT_ONCE", 64)
    others = [PlacedPicture(0, scaled(base, WIDE.rotate(180))), PlacedPicture(15, scaled(base, HIGH.rotate(180)))]
    tower.features_of(others)
    assert encoded == [2, 1, 1]  # more patches than one call takes
    tower.features_of(others[1:])
    assert encoded == [2, 1, 1], "the newest is kept"
    tower.features_of(others[:1])
    assert encoded == [2, 1, 1, 1], "the other is not"


def test_positions_are_those_of_transformers(tmp_path: Path) -> None:
    base = load(tmp_path)
    assert base.tower is not None
    one = Sequence(base, [3, WIDE, 4, HIGH, 2], 0)
    grids = image_processor(tmp_path)(images=[WIDE, HIGH], return_tensors="pt")["image_grid_thw"]
    theirs, _ = base.tower._model.get_rope_index(one.tokens[None], (one.tokens == 5).int()[None], grids)
    assert torch.equal(positions_with_pictures([len(one.tokens)], one.placed, CPU), theirs[:, 0])
    # Two pictures without text between them are two, and a picture may end a sequence.
    two = Sequence(base, [HIGH, HIGH], 0)
    first, second = positions_with_pictures([16, 2], two.placed, CPU).split([16, 2], 1)
    assert first[0].tolist() == [0] * 8 + [4] * 8
    assert first[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert first[2].tolist() == [0, 1] * 4 + [4, 5] * 4
    assert second.tolist() == [[0, 1]] * 3


def test_a_model_whose_pictures_are_computed_wrongly_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def transposed(*args: object) -> Tensor:
        return positions_with_pictures(*args)[[0, 2, 1]]  # type: ignore[arg-type]

    monkeypatch.setattr("tinsmith.modeling.picture_check.positions_with_pictures", transposed)
    base = BaseModel.load(make_vision_model(tmp_path), device=CPU, dtype=torch.float32)
    assert base.tower is None
    assert "with pictures, its logprobs differ by" in base.why_no_pictures
    assert "takes no pictures" in caplog.text


@pytest.mark.parametrize("family", fast_ones(VISION, ["Qwen3_5", "Gemma3"]))
def test_without_pictures_the_tower_is_not_loaded(family: str, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path, family)
    seeing = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    gc.collect()
    before = num_bytes()
    blind = BaseModel.load(folder, device=CPU, dtype=torch.float32, pictures=False)
    taken = num_bytes() - before
    towers = {name for name in seeing.parameters if ".language_model." not in name and name != "lm_head.weight"}
    of_towers = sum(seeing.parameters[name].nbytes for name in towers)
    assert seeing.parameters.keys() - blind.parameters.keys() == towers
    assert of_towers > 20_000
    assert taken <= sum(one.nbytes for one in seeing.parameters.values()) - of_towers + 10_000
    assert blind.tower is None
    assert blind.why_no_pictures.startswith("they are switched off here (pictures is false)")
    assert [one.name for one in blind.targets] == [one.name for one in seeing.targets if one.group != "vision"]
    assert blind.weights_sum == seeing.weights_sum, "a run may go on without pictures"
    tokens, positions = torch.arange(10, 20), torch.arange(10)
    with torch.no_grad():
        ours, theirs = (base.hidden_states(tokens, positions, Packed([10]), []) for base in (blind, seeing))
    assert torch.equal(ours, theirs)
    trained = BaseModel.load(folder, device=CPU, dtype=torch.float32, pictures=False, trainable=True)
    assert trained.parameters.keys() == seeing.parameters.keys(), "a checkpoint has all weights"


def num_bytes() -> int:
    """Bytes of all tensors in this process, but for weights in the layout of the CPU's products, whose size torch does
    not tell."""
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
    tensors = [one for one in tensors if one.layout is torch.strided]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def test_why_a_model_takes_no_pictures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    text = BaseModel.load(make_model(tmp_path / "text"), device=CPU, dtype=torch.float32)
    assert (text.tower, text.why_no_pictures) == (None, "it sees text only")
    folder = make_vision_model(tmp_path / "vision")
    full = BaseModel.load(folder, device=CPU, dtype=torch.float32, trainable=True)
    assert "when all parameters are trained" in full.why_no_pictures
    (folder / "preprocessor_config.json").unlink()
    bare = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    assert bare.why_no_pictures == "its files hold no image processor (preprocessor_config.json)"
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    other = BaseModel.load(folder, device=CPU, dtype=torch.float32)
    assert other.why_no_pictures.startswith("its image processor, CLIPImageProcessor")
    with pytest.raises(ValueError, match="not supported for models of type paligemma; they are for Qwen2-VL to Qwen3"):
        family_of(PaliGemmaConfig())
    assert full.tower is bare.tower is other.tower is None


def test_another_number_of_tokens_than_expected_is_refused_with_both(tmp_path: Path) -> None:
    base = load(tmp_path)
    assert scaled(base, WIDE, expected_tokens=15).num_tokens == 15
    with pytest.raises(InvalidRequest, match=r"^c.expected_tokens: expected 16 tokens, got 15 from image$") as refused:
        scaled(base, WIDE, expected_tokens=16)
    assert refused.value.metadata["field"] == "c.expected_tokens"
