"""The needs of the families that see pictures, from their processors and configurations."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers import InternVLConfig, LlavaConfig

from tests.support.models import VISION, image_processor, make_vision_model
from tinsmith.errors import InvalidRequest
from tinsmith.modeling.config import load_config
from tinsmith.pictures.families import FAMILIES, family_of
from tinsmith.pictures.processing import Picture, Processor

PIXELS = np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)


@pytest.mark.parametrize("family", VISION)
def test_what_a_tower_gets_is_bit_for_bit_what_the_models_own_processor_makes(family: str, tmp_path: Path) -> None:
    config = load_config(make_vision_model(tmp_path, family))
    processor = Processor.load(tmp_path, family_of(config), config)
    images = [Image.fromarray(PIXELS[:h, :w]) for w, h in ((37, 21), (17, 30), (90, 80))]
    pictures = [_made(processor, one) for one in images]
    theirs = image_processor(tmp_path)(images=images, return_tensors="np")
    ours = processor.arrays(pictures)
    if family == "InternVL":
        assert sum(ours.pop("num_patches")) == sum(theirs.pop("num_patches"))
    assert ours.keys() == dict(theirs).keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[name]))
    assert [one.num_tokens for one in pictures] == [processor.counting.tokens(*one.size, field="") for one in images]


def _made(processor: Processor, image: Image.Image) -> Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    return processor.picture(file.getvalue(), "png", expected_tokens=None, field="")


def test_the_tokens_of_mistral_3_end_each_row_and_the_picture(tmp_path: Path) -> None:
    config = load_config(make_vision_model(tmp_path, "Mistral3"))
    processor = Processor.load(tmp_path, family_of(config), config)
    wide = Image.fromarray(PIXELS[:16, :24])
    assert _made(processor, wide).tokens.tolist() == [5, 5, 5, 7, 5, 5, 5, 8]
    assert _made(processor, wide.rotate(90, expand=True)).num_tokens == 9
    rotated, upside_down, even = (io.BytesIO() for _ in range(3))
    wide.save(rotated, "JPEG", exif=_turned(6))
    wide.save(upside_down, "JPEG", exif=_turned(3))
    wide.crop((0, 0, 16, 16)).save(even, "JPEG", exif=_turned(6))
    with pytest.raises(InvalidRequest, match=r"^c\.data: the picture is rotated by its metadata .EXIF., which changes"):
        processor.picture(rotated.getvalue(), "jpeg", expected_tokens=None, field="c")
    for one, num_tokens in ((upside_down, 8), (even, 6)):
        assert processor.picture(one.getvalue(), "jpeg", expected_tokens=None, field="c").num_tokens == num_tokens


def _turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_mistral_3_without_the_tokens_that_end_rows_is_refused(tmp_path: Path) -> None:
    config = load_config(make_vision_model(tmp_path, "Mistral3"))
    words = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(words.replace("[IMG_BREAK]", "[ROW]"))
    with pytest.raises(
        ValueError, match=r"its tokenizer has no token .IMG_BREAK., which ends a row of a picture's tok"
    ):
        Processor.load(tmp_path, family_of(config), config)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"hold no tokenizer, which names the tokens .IMG_BREAK. and .IMG_END."):
        Processor.load(tmp_path, family_of(config), config)
    clip = SimpleNamespace(vision_config=SimpleNamespace(model_type="clip_vision_model"))
    with pytest.raises(ValueError, match="its vision tower, clip_vision_model, is not supported; pixtral is"):
        FAMILIES["mistral3"].counting(None, clip)


def test_settings_of_llava_and_internvl_that_are_not_supported_are_refused() -> None:
    llava, internvl = LlavaConfig(), InternVLConfig()
    whole = SimpleNamespace(size={"shortest_edge": 336}, crop_size={}, do_center_crop=False)
    with pytest.raises(ValueError, match="does not scale by the shorter side and crop, which alone is supported"):
        FAMILIES["llava"].counting(whole, llava)
    pixtral = LlavaConfig(vision_config={"model_type": "pixtral"})
    with pytest.raises(ValueError, match="its vision tower, pixtral, is not supported; clip_vision_model is"):
        FAMILIES["llava"].counting(whole, pixtral)
    with pytest.raises(ValueError, match="makes tiles of 384 x 384 pixels, and its tower takes others"):
        FAMILIES["internvl"].counting(SimpleNamespace(size={"height": 384, "width": 384}), internvl)


def test_gemma_3_with_pictures_cut_into_several_is_refused() -> None:
    cuts = SimpleNamespace(do_pan_and_scan=True)
    with pytest.raises(ValueError, match=r"cuts pictures into several .do_pan_and_scan., which is not supported"):
        FAMILIES["gemma3"].counting(cuts, None)


def test_what_stands_around_a_picture_in_a_chat() -> None:
    gemma4 = SimpleNamespace(boi_token_id=3, eoi_token_id=4)
    assert FAMILIES["gemma4"].in_chats(gemma4) == ([3], [4])
    assert FAMILIES["gemma3"].in_chats(None) is None, "line feeds around a picture join those of the text in one token"
    assert FAMILIES["qwen3_vl"].in_chats(None) == ((), ())
