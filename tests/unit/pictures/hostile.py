"""More than two hundred files that a client may send as pictures, each with what must become of it.

Run as a script, it decodes all of them in this process and prints one JSON object for each, and at the end the peak of
the process's memory.
"""

from __future__ import annotations

import io
import json
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class File:
    name: str
    data: bytes
    format: str
    pixels: np.ndarray | None = None
    """The right picture, uint8 [height, width, 3]. None if the file must be refused or, with `either`, may be."""
    says: str = ""
    """A part of the error message."""
    either: bool = False
    """Whether a picture of the header's size is right, too: for files with damage that the format cannot show."""
    tolerance: int = 0


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width: int, height: int, *, depth: int = 8, color: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))


def rows(pixels: np.ndarray) -> bytes:
    """The rows of a picture, each after its filter's number 0."""
    return b"".join(b"\0" + row.tobytes() for row in pixels)


def png(*chunks: bytes) -> bytes:
    return PNG + b"".join(chunks) + chunk(b"IEND", b"")


def saved(picture: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, file_format, **options)
    return buffer.getvalue()


def colors(width: int = 40, height: int = 24) -> np.ndarray:
    """A smooth picture without symmetry: uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], -1).astype(np.uint8)


def _modes(one: np.ndarray) -> Iterator[File]:
    picture = Image.fromarray(one)
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        converted = picture.convert(mode)
        yield File(f"png {mode}", saved(converted, "PNG"), "png", np.asarray(converted.convert("RGB")))
    for mode in ("L", "RGB", "CMYK"):
        converted = picture.convert(mode)
        yield File(
            f"jpeg {mode}",
            saved(converted, "JPEG", quality=95),
            "jpeg",
            np.asarray(converted.convert("RGB")),
            tolerance=24,
        )
    yield File("jpeg progressive", saved(picture, "JPEG", progressive=True, quality=95), "jpeg", one, tolerance=24)
    yield File("png interlaced", _interlaced(one), "png", one)
    grey = (np.arange(24 * 40).reshape(24, 40) * 68).astype(np.uint16)
    yield File(
        "png 16 bit grey", saved(Image.fromarray(grey), "PNG"), "png", np.stack([(grey >> 8).astype(np.uint8)] * 3, -1)
    )
    deep = (one.astype(np.uint16) * 256 + 77).astype(">u2")
    yield File(
        "png 16 bit colour", png(header(40, 24, depth=16), chunk(b"IDAT", zlib.compress(rows(deep)))), "png", one
    )
    yield File(
        "png one pixel", saved(Image.new("RGB", (1, 1), "red"), "PNG"), "png", np.array([[[255, 0, 0]]], np.uint8)
    )


def _interlaced(one: np.ndarray) -> bytes:
    parts = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    body = b"".join(rows(np.ascontiguousarray(one[y::down, x::across])) for y, x, down, across in parts)
    start = chunk(b"IHDR", struct.pack(">IIBBBBB", one.shape[1], one.shape[0], 8, 2, 0, 0, 1))
    return png(start, chunk(b"IDAT", zlib.compress(body)))


def _rotated(one: np.ndarray) -> Iterator[File]:
    """Files whose metadata ask for each of the eight rotations and reflections."""
    turns: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda a: a, lambda a: a[:, ::-1], lambda a: a[::-1, ::-1], lambda a: a[::-1], lambda a: a.swapaxes(0, 1),
        lambda a: np.rot90(a, -1), lambda a: np.rot90(a, 2).swapaxes(0, 1), lambda a: np.rot90(a, 1),
    ]  # fmt: skip
    for number, turn in enumerate(turns, 1):
        exif = Image.Exif()
        exif[0x0112] = number
        for name, options in (("png", {}), ("jpeg", {"quality": 95})):
            data = saved(Image.fromarray(one), name.upper(), exif=exif.tobytes(), **options)
            yield File(f"{name} rotation {number}", data, name, turn(one), tolerance=24 if name == "jpeg" else 0)
    exif = Image.Exif()
    exif[0x0112] = 99
    yield File("png unknown rotation", saved(Image.fromarray(one), "PNG", exif=exif.tobytes()), "png", one)
    yield File(
        "png broken metadata",
        saved(Image.fromarray(one), "PNG", exif=b"II*\0\xff\xff\xff\xff" * 9),
        "png",
        one,
        either=True,
    )


def _cut(one: np.ndarray) -> Iterator[File]:
    """Files that end too early."""
    picture = Image.fromarray(one)
    for name in ("png", "jpeg"):
        data = saved(picture, name.upper())
        for n in range(30):
            at = (n + 1) * (len(data) - 24) // 31
            yield File(f"{name} cut at {at}", data[:at], name, says="data: the picture is")


def _other_formats(one: np.ndarray) -> Iterator[File]:
    picture = Image.fromarray(one)
    others = {name: saved(picture, name) for name in ("GIF", "BMP", "WEBP", "TIFF", "PPM", "ICO", "TGA")}
    others |= {
        "nothing": b"", "zeros": b"\0" * 999, "text": b"hello", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "pdf": b"%PDF-1.7", "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n", "zip": b"PK\3\4" + b"\0" * 40,
        "html": b"<html><script>", "magic alone, png": PNG, "magic alone, jpeg": b"\xff\xd8\xff",
    }  # fmt: skip
    for name, data in others.items():
        yield File(f"{name} as png", data, "png", says="data: the picture is")
        yield File(f"{name} as jpeg", data, "jpeg", says="data: the picture is")
    yield File("png as jpeg", saved(picture, "PNG"), "jpeg", says="is no jpeg file")
    yield File("jpeg as png", saved(picture, "JPEG"), "png", says="is no png file")
    for name in ("gif", "", "PNG", "jpg", "../png"):
        yield File(f"format {name!r}", saved(picture, "PNG"), name, says=".format: ")


def _large() -> Iterator[File]:
    """Sizes and contents that would take much memory or time."""
    tiny = chunk(b"IDAT", zlib.compress(b"\0" * 99))
    for width, height in ((60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (1, 2**31 - 1), (5793, 5793)):
        yield File(
            f"png of {width} x {height}", png(header(width, height), tiny), "png", says=f"has {width} x {height} pixels"
        )
    for width, height in ((0, 9), (9, 0), (0, 0)):
        yield File(
            f"png of {width} x {height}", png(header(width, height), tiny), "png", says=f"has {width} x {height} pixels"
        )
    jpeg = bytearray(saved(Image.new("RGB", (16, 16)), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 60_000, 60_000)
    yield File("jpeg of 60000 x 60000", bytes(jpeg), "jpeg", says="has 60000 x 60000 pixels")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 5000, 5000)
    yield File("jpeg with a larger header", bytes(jpeg), "jpeg", either=True)
    zeros = zlib.compress(b"\0" * 300_000_000, 9)
    yield File("png with 300 MB behind 2 x 2 pixels", png(header(2, 2), chunk(b"IDAT", zeros)), "png", either=True)
    start = header(2, 2)
    end = chunk(b"IDAT", zlib.compress(rows(np.zeros((2, 2, 3), np.uint8))))
    bombs = {
        "zTXt": b"a\0\0" + zeros, "iTXt": b"a\0\1\0\0\0" + zeros, "iCCP": b"a\0\0" + zeros,
    }  # fmt: skip
    for kind, body in bombs.items():
        yield File(f"png with 300 MB of {kind}", png(start, chunk(kind.encode(), body), end), "png", either=True)
    many = chunk(b"tEXt", b"a\0" + b"b" * 50) * 20_000
    yield File("png with 20,000 texts", png(start, many, end), "png", np.zeros((2, 2, 3), np.uint8), either=True)
    white = np.full((5792, 5792, 3), 255, np.uint8)
    whole = png(header(5792, 5792), chunk(b"IDAT", zlib.compress(rows(white), 1)))
    yield File("png of the largest size", whole, "png", white)
    yield File("png of too many bytes", whole + b"\0" * 21_000_000, "png", says="and this server allows 20971520")
    scanned = saved(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    first, last = scanned.index(b"\xff\xda"), scanned.rindex(b"\xff\xda")
    scans = scanned[first:last]
    yield File(
        "jpeg with 1000 scans", scanned[:first] + scans * 120 + scanned[last:], "jpeg", says="scans, and this server"
    )
    for frames in (2, 5):
        pictures = [Image.new("RGB", (8, 8), (n * 40, 0, 0)) for n in range(frames)]
        data = saved(pictures[0], "PNG", save_all=True, append_images=pictures[1:])
        yield File(f"png of {frames} frames", data, "png", says="is animated")


def _broken_structure(one: np.ndarray) -> Iterator[File]:
    good = zlib.compress(rows(one))
    for name, depth, color in (("depth 7", 7, 2), ("depth 0", 0, 0), ("colour 5", 8, 5), ("colour 255", 8, 255)):
        yield File(
            f"png {name}", png(header(40, 24, depth=depth, color=color), chunk(b"IDAT", good)), "png", says="is broken"
        )
    yield File("png without pixels", png(header(40, 24)), "png", says="is broken")
    yield File("png without a palette", png(header(40, 24, color=3), chunk(b"IDAT", good)), "png", either=True)
    yield File(
        "png with pixels that are no zlib", png(header(40, 24), chunk(b"IDAT", b"hello")), "png", says="is broken"
    )
    short = zlib.compress(rows(one)[:500])
    yield File("png with too few pixels", png(header(40, 24), chunk(b"IDAT", short)), "png", either=True)
    yield File(
        "png with two headers", png(header(40, 24), header(9999, 9999), chunk(b"IDAT", good)), "png", either=True
    )
    wrong = bytearray(png(header(40, 24), chunk(b"IDAT", good)))
    wrong[-20] ^= 255
    yield File("png with a wrong checksum", bytes(wrong), "png", says="is broken")
    yield File(
        "png with a chunk of 2 GB",
        PNG + header(40, 24) + struct.pack(">I4s", 2**31 - 1, b"IDAT") + good,
        "png",
        either=True,
    )


def _flipped(one: np.ndarray, *, seed: int, count: int) -> Iterator[File]:
    """Files with some bytes changed at random."""
    generator = random.Random(seed)
    picture = Image.fromarray(one)
    for n in range(count):
        name = ("png", "jpeg")[n % 2]
        data = bytearray(saved(picture, name.upper()))
        for _ in range(1 + n % 7):
            data[generator.randrange(4, len(data))] = generator.randrange(256)
        yield File(f"{name} changed {n}", bytes(data), name, either=True)


def files() -> Iterator[File]:
    one = colors()
    yield from _modes(one)
    yield from _rotated(one)
    yield from _cut(one)
    yield from _other_formats(one)
    yield from _large()
    yield from _broken_structure(one)
    yield from _flipped(one, seed=1, count=60)


def _peak_kb() -> int:
    """Most resident memory of this process since it began, in KiB. getrusage's is also that of the process that started
    this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    from tinsmith.errors import InvalidRequest
    from tinsmith.pictures.decoding import decode

    for file in files():
        before = _peak_kb()
        line: dict[str, Any] = {"name": file.name}
        try:
            got = np.asarray(decode(file.data, file.format, field="prompt[3].image"))
        except InvalidRequest as error:
            line |= {"error": error.message, "field": error.metadata["field"]}
            line["right"] = error.message.startswith("prompt[3].image.") and (
                file.either or (file.pixels is None and file.says in error.message)
            )
        else:
            line["shape"] = got.shape
            if file.pixels is None:
                line["right"] = file.either
            else:
                close = got.shape == file.pixels.shape and bool(
                    (np.abs(got.astype(np.int16) - file.pixels) <= file.tolerance).all()
                )
                line["right"] = close
        line["grown"] = _peak_kb() - before
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"peak_kb": _peak_kb()}) + "\n")


if __name__ == "__main__":
    main()
