"""Pictures from clients: the right pixels or an error that names chunk and reason, within bounded memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.pictures.hostile import colors, files, png, saved
from tinsmith.errors import InvalidRequest
from tinsmith.pictures.headers import MAX_PIXELS, size_of

_LARGEST_KB = 14 * MAX_PIXELS // 1024 + 250_000
"""The 12 bytes for each pixel that headers.py promises, 2 for the file and the test's own copy, and 250 MB for Python,
numpy and the hostile files themselves."""


@pytest.mark.slow
def test_two_hundred_hostile_files_give_the_right_picture_or_an_error_and_memory_stays_bounded() -> None:
    script = Path(__file__).with_name("hostile.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, peak = (json.loads(line) for line in done.stdout.splitlines())
    assert len(lines) >= 200
    assert [line for line in lines if not line["right"]] == []
    assert sum("error" in line for line in lines) >= 100
    assert sum("shape" in line for line in lines) >= 30
    assert peak["peak_kb"] < _LARGEST_KB


def test_each_hostile_file_is_another() -> None:
    names = [file.name for file in files()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_the_size_is_read_from_the_header_alone(name: str) -> None:
    from PIL import Image

    for width, height in ((1, 1), (40, 24), (333, 17)):
        data = saved(Image.new("RGB", (width, height)), name.upper())
        assert size_of(data, name, field="x") == (width, height)


def test_a_header_without_its_file_is_no_size() -> None:
    assert colors().shape == (24, 40, 3)
    with pytest.raises(InvalidRequest, match=r"data\[0\].model_input\[1\].image.data: the picture is broken"):
        size_of(png()[:20], "png", field="data[0].model_input[1].image")
