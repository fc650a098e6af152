"""Pictures in prompts: the sampler gives what transformers computes, however its steps cut prompts and mix requests."""

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText

from sampler_service.convert import request_from_proto
from sampler_service.core.request import EMPTY_LOGPROB, Request, Result
from sampler_service.servicer import _may_be_large
from sampler_service.torch_engine.engine import TorchEngine
from sampler_service.torch_engine.kv_cache import BLOCK_TOKENS, digests_of
from tests.support.models import VISION, image_processor, kinds_of, make_vision_model
from tests.unit.sampler_service.serving import serving
from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.self_check import only, random_adapter
from tinsmith.v1 import sampler_pb2 as pb
from tinsmith.v1 import types_pb2
from trainer_service.weight_sync.canary import score, with_picture
from trainer_service.weight_sync.certificate import chunks_of

PIXELS = np.random.default_rng(0).integers(256, size=(90, 90, 3), dtype=np.uint8)
WIDE, HIGH = (Image.fromarray(PIXELS[:h, :w]) for w, h in ((37, 21), (17, 30)))
"""15 and 8 tokens."""
TOKENS_OF_WIDE = {"Gemma3": 9, "Gemma4": 66, "Mistral3": 18, "Llava": 9, "InternVL": 12}
OTHER = Image.fromarray(255 - PIXELS[:21, :37])


def chunk(image: Image.Image, **fields: Any) -> types_pb2.Chunk:
    file = io.BytesIO()
    image.save(file, "PNG")
    return types_pb2.Chunk(image=types_pb2.Image(**{"data": file.getvalue(), "format": "png", **fields}))


def text(length: int, *, seed: int = 0) -> types_pb2.Chunk:
    tokens = np.random.default_rng(seed).integers(10, 256, length).astype("<i4")
    return types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=tokens.tobytes()))


def asked(engine: TorchEngine, *chunks: types_pb2.Chunk, **fields: Any) -> Request:
    # transformers' own model would take a drawn token of pictures, 5, or of videos, 6, for one.
    params = pb.SamplingParams(max_tokens=5, seed=1, stop=pb.StopCondition(), logit_bias={5: -100, 6: -100})
    message = pb.SampleRequest(**{"prompt": chunks, "num_samples": 1, "sampling_params": params, **fields})
    assert _may_be_large(message) == any(one.HasField("image") for one in chunks)
    most = engine.limits.max_length
    return request_from_proto(
        message, processor=engine.processor, why_no_pictures=engine.why_no_pictures, max_tokens=most
    )


async def answer(engine: TorchEngine, request: Request) -> Result:
    return await (await engine.submit(request)).result()


class Oracle:
    """transformers' own model and processor."""

    def __init__(self, folder: Path) -> None:
        self.processor = image_processor(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    @torch.no_grad()
    def check(self, result: Result, request: Request, images: list[Image.Image]) -> None:
        """The logprobs of the prompt, at pictures those of the token that stands for one, and of each sample are its
        own."""
        assert result.prompt.logprobs is not None
        is_picture = np.zeros(len(request.prompt) + 5, bool)
        for one in request.pictures:
            is_picture[one.start : one.stop] = True
        for sequence in result.sequences:
            assert len(sequence.tokens) == 5
            tokens = torch.from_numpy(np.concatenate([request.prompt, sequence.tokens]).astype(np.int64))
            more = dict(self.processor(images=images, return_tensors="pt")) if images else {}
            more = {name: one for name, one in more.items() if name not in ("num_crops", "num_patches")}
            if images:
                more |= kinds_of(self.model, torch.from_numpy(is_picture))
            table = self.model(input_ids=tokens[None], **more).logits[0].log_softmax(-1)
            theirs = table[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
            mine = np.concatenate([result.prompt.logprobs[1:], sequence.logprobs])
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("family", "packs"), [*((family, True) for family in VISION), ("Qwen3VL", False)])
async def test_the_sampler_is_transformers(
    family: str, packs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one and two pictures and of text alone, computed in pieces of 8 tokens, beside each other; their
    samples go on from one prompt. The pieces cut pictures, except those of Gemma 3 and 4."""
    if not packs:  # one sequence at a time
        monkeypatch.setattr("tinsmith.modeling.capabilities._unpackable", lambda config: "a test")
    oracle = Oracle(make_vision_model(tmp_path, family))
    prompts: list[tuple[list[types_pb2.Chunk], list[Image.Image]]] = [
        (
            [
                text(3),
                chunk(WIDE, expected_tokens=TOKENS_OF_WIDE.get(family, 15)),
                text(4, seed=1),
                chunk(HIGH),
                text(2),
            ],
            [WIDE, HIGH],
        ),
        ([text(9)], []),
        ([chunk(HIGH), text(1)], [HIGH]),
        ([text(20, seed=3), chunk(WIDE)], [WIDE]),
    ]
    async with serving(tmp_path, prefill_tokens_per_step=8) as engine:
        requests = [asked(engine, *chunks, num_samples=3, prompt_logprobs=True) for chunks, _ in prompts]
        results = await asyncio.gather(*(answer(engine, one) for one in requests))
        for result, request, (_, images) in zip(results, requests, prompts, strict=True):
            oracle.check(result, request, images)


async def test_a_version_that_adapts_the_tower_is_sampled_as_it_is_trained(tmp_path: Path) -> None:
    """Beside the base model, on the same pictures and prefixes. The canary with a picture shows it."""
    plain, adapted = (Oracle(make_vision_model(tmp_path / "model")) for _ in range(2))
    trainer = BaseModel.load(tmp_path / "model", device=torch.device("cpu"), dtype=torch.float32)
    adapter = random_adapter(only("vision", rank=2, seed=1), trainer.targets, trainer.device)
    (tmp_path / "adapter").mkdir()
    adapter.save_peft(tmp_path / "adapter", base_model="tiny")
    adapted.model = PeftModel.from_pretrained(adapted.model, tmp_path / "adapter").merge_and_unload()
    async with serving(tmp_path / "model", prefill_tokens_per_step=8) as engine:
        await engine.install("v", adapter)
        prompt, oracles = [text(20, seed=3), chunk(WIDE), text(2)], {"": plain, "v": adapted}
        for _ in range(2):
            requests = [asked(engine, *prompt, prompt_logprobs=True, version_id=one) for one in oracles]
            results = await asyncio.gather(*(answer(engine, one) for one in requests))
            for result, request, oracle in zip(results, requests, oracles.values(), strict=True):
                oracle.check(result, request, [WIDE])
            drawn = await answer(engine, asked(engine, *prompt, version_id="v"))
            np.testing.assert_allclose(
                drawn.sequences[0].logprobs, results[1].sequences[0].logprobs, rtol=1e-4, atol=1e-4
            )
            assert drawn.prompt_cache_hit_tokens > 0
            base, version = (np.asarray(one.sequences[0].logprobs) for one in results)
            assert np.abs(base - version).max() > 0.01
        tower = engine.base.tower
        assert tower is not None
        assert {version for version, _ in tower._kept} == {0, 2}  # 1 was the warm-up
        (seen,) = with_picture(trainer)
        shown = await answer(engine, asked(engine, *chunks_of(seen), prompt_logprobs=True, version_id="v"))
        ours, without = (score(trainer, weights, [seen]) for weights in (adapter, None))
        assert shown.prompt.logprobs is not None
        np.testing.assert_allclose(shown.prompt.logprobs[1:], ours, rtol=1e-4, atol=1e-4)
        assert np.abs(ours - without).max() > 0.01


async def test_a_prefix_is_reused_with_its_own_pictures_only(tmp_path: Path) -> None:
    oracle = Oracle(make_vision_model(tmp_path))
    async with serving(tmp_path) as engine:
        begin, end = text(6), text(30, seed=1)
        chunks = {name: (begin, chunk(image), end) for name, image in (("wide", WIDE), ("other", OTHER))}
        for name, image, hit in (("wide", WIDE, 0), ("other", OTHER, 0), ("wide", WIDE, 48), ("other", OTHER, 48)):
            request = asked(engine, *chunks[name], prompt_logprobs=True, prompt_logprobs_last_n=1)
            result = await answer(engine, request)
            assert result.prompt_cache_hit_tokens == hit
            unscored = asked(engine, *chunks[name], prompt_logprobs=True)
            full = await answer(engine, unscored)
            oracle.check(full, unscored, [image])
            assert result.prompt.logprobs is not None
            assert full.prompt.logprobs is not None
            np.testing.assert_allclose(result.prompt.logprobs[-1:], full.prompt.logprobs[-1:], rtol=1e-4, atol=1e-4)


async def test_no_hit_ends_within_a_picture_whose_tokens_see_each_other(tmp_path: Path) -> None:
    oracle = Oracle(make_vision_model(tmp_path, "Gemma3"))
    async with serving(tmp_path) as engine:
        begin = text(10), chunk(WIDE)  # the picture has the tokens 10 to 18, and the first block the tokens 0 to 15
        for end, hit in ((text(32, seed=1), 0), (text(32, seed=2), 10), (text(32, seed=1), 48)):
            request = asked(engine, *begin, end, prompt_logprobs=True, prompt_logprobs_last_n=1)
            assert (await answer(engine, request)).prompt_cache_hit_tokens == hit
            drawn = asked(engine, *begin, end, prompt_logprobs=True)
            full = await answer(engine, drawn)
            oracle.check(full, drawn, [WIDE])
            unscored = await answer(engine, asked(engine, *begin, end))
            assert unscored.prompt_cache_hit_tokens == 48
            np.testing.assert_allclose(unscored.sequences[0].logprobs, full.sequences[0].logprobs, rtol=1e-4, atol=1e-4)


async def test_pictures_whose_tokens_see_each_other_have_text_between_them(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "Gemma3")
    async with serving(tmp_path) as engine:
        assert len(asked(engine, chunk(WIDE), text(1), chunk(WIDE)).prompt) == 19
        for between in ((), (text(0),)):
            with pytest.raises(
                InvalidRequest, match=r"^prompt\[\d\]: a picture follows another one at once; in this ba"
            ):
                asked(engine, chunk(WIDE), *between, chunk(WIDE))


async def test_blocks_of_pictures_have_digests_of_their_own(tmp_path: Path) -> None:
    make_vision_model(tmp_path)
    async with serving(tmp_path) as engine:
        wide, other = (asked(engine, text(6), chunk(image), text(30)) for image in (WIDE, OTHER))
        assert wide.prompt.tolist() == other.prompt.tolist()
        one, two, none = (digests_of(0, wide.prompt, pictures=each) for each in (wide.pictures, other.pictures, ()))
        assert len(one) == len(wide.prompt) // BLOCK_TOKENS
        assert not {*one} & {*two}
        assert not {*one} & {*none}
        after = asked(engine, text(16, seed=5), chunk(WIDE), text(1))
        assert digests_of(0, after.prompt, pictures=after.pictures)[0] == digests_of(0, after.prompt)[0]


async def test_the_tokens_of_pictures_have_no_scores(tmp_path: Path) -> None:
    make_vision_model(tmp_path)
    async with serving(tmp_path) as engine:
        request = asked(engine, text(2), chunk(HIGH), text(3), topk_prompt_logprobs=2)
        table = (await answer(engine, request)).prompt.topk
        assert table is not None
        assert (table.logprobs[2:10] == EMPTY_LOGPROB).all()
        assert (table.logprobs[10:] > EMPTY_LOGPROB).all()


async def test_a_picture_on_which_the_tower_fails_ends_its_own_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(make_vision_model(tmp_path))
    async with serving(tmp_path) as engine:
        tower = engine.base.tower
        assert tower is not None
        encode = tower.encode

        def fails(pictures: Any) -> Any:
            if pictures[0].grid == (4, 2):
                raise RuntimeError("no such picture")
            return encode(pictures)

        monkeypatch.setattr(tower, "encode", fails)
        good = asked(engine, text(2), chunk(WIDE), text(3), prompt_logprobs=True)
        bad = asked(engine, text(2), chunk(HIGH), text(20))
        result, error = await asyncio.gather(answer(engine, good), answer(engine, bad), return_exceptions=True)
        assert isinstance(error, ServiceError)
        assert "the engine failed in this request: no such picture" in error.message
        assert isinstance(result, Result)
        oracle.check(result, good, [WIDE])
        monkeypatch.undo()
        bad = asked(engine, text(2), chunk(HIGH), text(20), prompt_logprobs=True)
        oracle.check(await answer(engine, bad), bad, [HIGH])  # nothing wrong was kept


async def test_a_picture_that_cannot_be_taken_is_refused_by_its_chunk(tmp_path: Path) -> None:
    make_vision_model(tmp_path)
    async with serving(tmp_path) as engine:
        with pytest.raises(InvalidRequest, match=r"^prompt\[1\]\.expected_tokens: expected 9 tokens, got 8 from image"):
            asked(engine, text(2), chunk(HIGH, expected_tokens=9))
        with pytest.raises(InvalidRequest, match=r"^prompt: 135 tokens, with those of its pictures, are above 128"):
            asked(engine, *[chunk(WIDE)] * 9)
        with pytest.raises(InvalidRequest, match=r"^prompt\[0\]\.data: the picture is no png file: it is empty"):
            asked(engine, chunk(HIGH, data=b""))
