"""Pictures in chats: parts with data URLs become chunks where the chat template shows them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.gateway.https_files import HEADER, LOCAL, Files, serve_files
from tests.unit.gateway.stack import BASE_MODEL, Client, Stack
from tests.unit.gateway.talking import END, PICTURE, START, TalkingSampler
from tests.unit.gateway.test_openai import SAYS, ask, events, refusal
from tinsmith.v1 import trainer_pb2

pytestmark = pytest.mark.gateway(sampler=TalkingSampler)

URL = "data:image/png;base64," + base64.b64encode(HEADER).decode()
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
CHAT: dict[str, Any] = {
    "model": BASE_MODEL,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "A"}, IMAGE, {"type": "text", "text": "B"}, IMAGE]},
        {"role": "assistant", "content": "C"},
    ],
}


@pytest.fixture
async def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Files]:
    async with serve_files(tmp_path / "certificates", monkeypatch) as files:
        yield files


@pytest.fixture
def sampler(stack: Stack) -> TalkingSampler:
    assert isinstance(stack.sampler, TalkingSampler)
    return stack.sampler


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(base_url=stack.url, timeout=20, headers={"authorization": "Bearer tml-test"}) as client:
        yield client


async def sees(stack: Stack, sampler: TalkingSampler) -> int:
    """Lets the base model take pictures, of 15 tokens for 37 x 21 pixels. Returns the token that stands for one."""
    (token,) = sampler.tokenizer.encode(PICTURE).ids
    stack.trainer.picture_counting = trainer_pb2.PictureCounting(
        rule="area",
        settings={"patch_size": 4, "merge_size": 2, "min_pixels": 128, "max_pixels": 2048},
        picture_token=token,
    )
    await stack.gateway.clients.trainers[0].ask()
    return token


async def test_a_picture_in_a_chat_has_the_tokens_around_it_that_the_models_processor_puts_there(
    stack: Stack, sampler: TalkingSampler, client: Client
) -> None:
    token = await sees(stack, sampler)
    assert stack.trainer.picture_counting is not None
    stack.trainer.picture_counting.before.extend([3, 4])
    stack.trainer.picture_counting.after.append(5)
    await stack.gateway.clients.trainers[0].ask()
    answer = await ask(client, "chat/completions", CHAT, return_token_ids=True)
    texts = [f"{START}user:A", "B", f"{END}{START}assistant:C{END}"]
    begin, middle, end = (sampler.tokenizer.encode(text).ids for text in texts)
    picture = [3, 4, *[token] * 15, 5]
    assert answer["prompt_token_ids"] == [*begin, *picture, *middle, *picture, *end]


async def test_a_model_whose_processor_changes_the_text_takes_no_pictures_in_chats(
    stack: Stack, sampler: TalkingSampler, client: Client
) -> None:
    await sees(stack, sampler)
    assert stack.trainer.picture_counting is not None
    stack.trainer.picture_counting.ClearField("picture_token")
    await stack.gateway.clients.trainers[0].ask()
    error = await refusal(client, "chat/completions", CHAT)
    assert "takes pictures in prompts of tokens only (ImageChunk)" in error["message"]


async def test_pictures_of_a_chat_become_chunks(stack: Stack, sampler: TalkingSampler, client: Client) -> None:
    token = await sees(stack, sampler)
    answer = await ask(client, "chat/completions", CHAT, return_token_ids=True)
    assert answer["choices"][0]["message"]["content"] == SAYS
    first, one, middle, two, last = sampler.requests[-1].prompt
    for chunk in (one, two):
        assert (chunk.image.data, chunk.image.format, chunk.image.expected_tokens) == (HEADER, "png", 15)
    texts = [np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist() for chunk in (first, middle, last)]
    expected = [f"{START}user:A", "B", f"{END}{START}assistant:C{END}"]
    assert texts == [sampler.tokenizer.encode(text).ids for text in expected]
    whole = [*texts[0], *[token] * 15, *texts[1], *[token] * 15, *texts[2]]
    assert answer["prompt_token_ids"] == whole
    assert answer["usage"]["prompt_tokens"] == len(whole)
    chunks = await events(client, "chat/completions", CHAT)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == SAYS
    assert len(sampler.requests[-1].prompt) == 5


async def test_pictures_of_a_response_become_the_chunks_of_the_same_chat(
    stack: Stack, sampler: TalkingSampler, client: Client
) -> None:
    await sees(stack, sampler)
    await ask(client, "chat/completions", CHAT)
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    content = [{"type": "input_text", "text": "A"}, image, {"type": "input_text", "text": "B"}, image]
    items = [{"role": "user", "content": content}, {"role": "assistant", "content": "C"}]
    answer = await ask(client, "responses", {"model": BASE_MODEL, "input": items})
    assert answer["output"][0]["content"][0]["text"] == SAYS
    chat, response = sampler.requests[-2:]
    assert list(response.prompt) == list(chat.prompt)
    assert answer["usage"]["input_tokens"] > 2 * 15


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"image_url": "https://example.org/cat.png"}, "input: 'https://example.org/cat.png' is no data URL of a PNG"),
        ({"image_url": "data:image/jpeg;base64,AAAA"}, "input: picture 1.data: the picture is no jpeg file"),
        ({"image_url": URL, "detail": "high"}, "detail"),
        ({"file_id": "file-1"}, "image_url"),
    ],
)
async def test_a_response_refuses_what_is_no_picture(
    stack: Stack, sampler: TalkingSampler, client: Client, image: dict[str, str], message: str
) -> None:
    await sees(stack, sampler)
    items = [{"role": "user", "content": [{"type": "input_image", **image}]}]
    error = await refusal(client, "responses", {"model": BASE_MODEL, "input": items})
    assert message in error["message"], error
    assert not sampler.requests


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/cat.png", "'https://example.org/cat.png' is no data URL of a PNG or JPEG"),
        ("data:image/gif;base64,AAAA", "is no data URL of a PNG or JPEG"),
        ("data:image/png;base64,!", "messages[0].content[0].image_url.url: '!' is not base64"),
        ("data:image/jpeg;base64,AAAA", "messages: picture 1.data: the picture is no jpeg file"),
    ],
)
async def test_what_is_no_picture_is_refused(
    stack: Stack,
    sampler: TalkingSampler,
    client: Client,
    url: str,
    message: str,
) -> None:
    await sees(stack, sampler)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    assert message in (await refusal(client, "chat/completions", CHAT, messages=messages))["message"]
    assert not sampler.requests


async def test_a_picture_is_fetched_from_a_listed_host(stack: Stack, sampler: TalkingSampler, files: Files) -> None:
    url = f"https://{files.host}/good.png?size=1"
    await stack.restart_gateway(image_hosts=[files.host], image_networks=LOCAL)
    await sees(stack, sampler)
    async with Client(base_url=stack.url, timeout=20, headers={"authorization": "Bearer tml-test"}) as client:
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in (url, URL, url)]
        await ask(client, "chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}]})
        images = [chunk.image for chunk in sampler.requests[-1].prompt if chunk.HasField("image")]
        assert [(image.data, image.format, image.expected_tokens) for image in images] == [(HEADER, "png", 15)] * 3
        assert len(files.asked) == 1
        error = await refusal(
            client,
            "chat/completions",
            CHAT,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "https://other.example/a.png"}}],
                }
            ],
        )
        assert "'other.example', which is not one of this server's image_hosts" in error["message"]
        error = await refusal(
            client,
            "chat/completions",
            CHAT,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}],
        )
        assert "'a.png' is no data URL" in error["message"]


async def test_pictures_need_a_model_that_sees_and_a_place_in_its_template(
    stack: Stack,
    sampler: TalkingSampler,
    client: Client,
) -> None:
    error = await refusal(client, "chat/completions", CHAT)
    assert f"messages: {BASE_MODEL!r} takes no pictures here" in error["message"]
    await sees(stack, sampler)
    messages = [{"role": "user", "content": [{"type": "text", "text": PICTURE}, IMAGE]}]
    error = await refusal(client, "chat/completions", CHAT, messages=messages)
    assert "there are 1 pictures, but after the model's chat template 2 tokens" in error["message"]
    high = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    error = await refusal(client, "chat/completions", CHAT, messages=[{"role": "user", "content": [high]}])
    assert "detail" in error["message"]
    assert not sampler.requests
