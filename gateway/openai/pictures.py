"""Pictures in chats: content parts with data URLs, placed where the model's chat template shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gateway.assets import Assets
from gateway.convert import picture_of
from gateway.gateway import Gateway
from gateway.load import Share
from gateway.openai.schemas import ChatMessage, ImagePart
from gateway.shown import shown
from tinsmith.errors import InvalidRequest
from tinsmith.pictures.counting import Counting
from tinsmith.pictures.headers import PNG, size_of
from tinsmith.threads import in_pool
from tinsmith.v1 import types_pb2

_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with pictures, for the sampler."""

    chunks: Sequence[types_pb2.Chunk]
    tokens: bytes
    """int32 tokens, little endian. All tokens of a picture are the model's `picture_token`."""


async def images_of(assets: Assets, messages: Sequence[ChatMessage], share: Share) -> list[types_pb2.Image]:
    """The pictures of a chat, in their order. `share`: counts the bytes of fetched pictures.

    Raises InvalidRequest, which names the part, for a URL of a host that is not allowed, or of anything but a PNG or
    JPEG.
    """
    urls = [
        (f"messages[{number}].content[{index}].image_url.url", part.image_url.url)
        for number, message in enumerate(messages)
        for index, part in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(part, ImagePart)
    ]
    remote = {url: (where, None) for where, url in urls if assets.fetches and url.startswith("https:")}
    given = [(where, url) for where, url in urls if url not in remote]
    images = dict(zip([url for _, url in given], await in_pool(_decoded, given), strict=True))
    for url, data in (await assets.read(remote, share)).items() if remote else ():
        images[url] = types_pb2.Image(data=data, format="png" if data.startswith(PNG) else "jpeg")
    return [copy_of(images[url]) for _, url in urls]


def copy_of(image: types_pb2.Image) -> types_pb2.Image:
    made = types_pb2.Image()
    made.CopyFrom(image)
    return made


def _decoded(urls: Sequence[tuple[str, str]]) -> list[types_pb2.Image]:
    """The pictures of data URLs, each given with the name of its part."""
    images = []
    for where, url in urls:
        found = picture_of(url, field=where)
        if found is None:
            raise InvalidRequest(
                f"{where}: {shown(url[:60])} is no data URL of a PNG or JPEG, such as data:image/png;base64,...; "
                "this server fetches no such files",
                field="messages",
            )
        images.append(types_pb2.Image(format=found[0], data=found[1]))
    return images


def placed(gateway: Gateway, base_model: str, tokens: bytes, images: Sequence[types_pb2.Image]) -> Prompt:
    """The prompt with its pictures. `tokens`: int32 tokens of the rendered chat, in which one token stands for each
    picture.

    Raises InvalidRequest for a model that takes no pictures, and for a chat template that does not show all of them.
    """
    counting, found = gateway.clients.counting(base_model), gateway.clients.picture_counting(base_model)
    if counting is None or found is None:
        raise InvalidRequest(f"messages: {base_model!r} takes no pictures here; send text only", field="messages")
    if not found.HasField("picture_token"):
        raise InvalidRequest(
            f"messages: {base_model!r} takes pictures in prompts of tokens only (ImageChunk), because its own "
            "processor changes the text around a picture; send text only",
            field="messages",
        )
    ids = np.frombuffer(tokens, _INT32)
    (places,) = np.nonzero(ids == found.picture_token)
    before, after = np.array(found.before, _INT32), np.array(found.after, _INT32)
    if len(places) != len(images):
        raise InvalidRequest(
            f"messages: there are {len(images)} pictures, but after the model's chat template {len(places)} tokens "
            "that stand for a picture; do not write such tokens into the text",
            field="messages",
        )
    chunks: list[types_pb2.Chunk] = []
    parts: list[np.ndarray] = []
    start, ending = 0, ids[:0]
    for place, image, number in zip(places.tolist(), images, range(len(images)), strict=True):
        _add_text(chunks, parts, np.concatenate([ending, ids[start:place], before]))
        image.expected_tokens = _tokens_of(image, counting, number)
        chunks.append(types_pb2.Chunk(image=image))
        parts.append(np.full(image.expected_tokens, found.picture_token, _INT32))
        start, ending = place + 1, after
    _add_text(chunks, parts, np.concatenate([ending, ids[start:]]))
    return Prompt(chunks, np.concatenate(parts).astype(_INT32).tobytes())


def _tokens_of(image: types_pb2.Image, counting: Counting, number: int) -> int:
    where = f"messages: picture {number + 1}"
    return counting.tokens(*size_of(image.data, image.format, field=where), field=where)


def _add_text(chunks: list[types_pb2.Chunk], parts: list[np.ndarray], ids: np.ndarray) -> None:
    if len(ids):
        chunks.append(types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=ids.tobytes())))
        parts.append(ids)
