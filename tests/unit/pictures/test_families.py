"""The needs of the families that see pictures, from their processors and configurations."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.support.models import VISION, image_processor, make_vision_model
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
    assert ours.keys() == dict(theirs).keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[name]))
    assert [one.num_tokens for one in pictures] == [processor.counting.tokens(*one.size, field="") for one in images]


def _made(processor: Processor, image: Image.Image) -> Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    return processor.picture(file.getvalue(), "png", expected_tokens=None, field="")


def test_gemma_3_with_pictures_cut_into_several_is_refused() -> None:
    cuts = SimpleNamespace(do_pan_and_scan=True)
    with pytest.raises(ValueError, match=r"cuts pictures into several .do_pan_and_scan., which is not supported"):
        FAMILIES["gemma3"].counting(cuts, None)


def test_what_stands_around_a_picture_in_a_chat() -> None:
    gemma4 = SimpleNamespace(boi_token_id=3, eoi_token_id=4)
    assert FAMILIES["gemma4"].in_chats(gemma4) == ([3], [4])
    assert FAMILIES["gemma3"].in_chats(None) is None, "line feeds around a picture join those of the text in one token"
    assert FAMILIES["qwen3_vl"].in_chats(None) == ((), ())
