"""Pictures through the unmodified SDK: a tiny Qwen3-VL learns to tell stripes, is published, and answers."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from PIL import Image
from tinker import types

from tests.support.examples import BASE_MODEL, new_model
from tests.support.models import make_vision_model
from tests.support.stack import Stack

QUESTION, ANSWERS = [20, 21, 22], (30, 31)
ADAM = tinker.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = make_vision_model(tmp_path_factory.mktemp("model"))
    with Stack(tmp_path_factory.mktemp("vision"), base_models=[f"{BASE_MODEL}={folder}"]) as running:
        yield running


def picture(kind: int, seed: int, *, expected_tokens: int = 8) -> types.ImageChunk:
    """32 x 16 pixels, 8 tokens: stripes that lie (0) or stand (1), of some width and colours."""
    rng = np.random.default_rng(seed)
    stripes = np.indices((16, 32))[kind] // rng.integers(2, 5) % 2 == 0
    pixels = np.where(stripes[..., None], *rng.permutation([rng.integers(0, 90, 3), rng.integers(160, 256, 3)]))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=expected_tokens)


def prompt(kind: int, seed: int, **fields: int) -> types.ModelInput:
    chunks = [
        types.EncodedTextChunk(tokens=[7]),
        picture(kind, seed, **fields),
        types.EncodedTextChunk(tokens=QUESTION),
    ]
    return types.ModelInput(chunks=chunks)


def datum(kind: int, seed: int, **fields: int) -> types.Datum:
    model_input = prompt(kind, seed, **fields)
    weights = np.zeros(model_input.length, np.float32)
    weights[-1] = 1
    targets = np.zeros(model_input.length, np.int64)
    targets[-1] = ANSWERS[kind]
    return types.Datum(
        model_input=model_input,
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", ["false", "true"])
def test_a_model_learns_from_pictures_and_is_sampled_with_them(stack: Stack, train_vision: str) -> None:
    unseen = [(seed % 2, 1000 + seed) for seed in range(16)]
    with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service:
        client = new_model(service, seed=1, user_metadata={"train_vision": train_vision})
        for step in range(30):
            batch = [datum(n % 2, 16 * step + n) for n in range(16)]
            result = client.forward_backward(batch, "cross_entropy")
            client.optim_step(ADAM).result()
            assert result.result().metrics["num_tokens:sum"] == 16 * 12
        trained = client.forward([datum(*one) for one in unseen], "cross_entropy").result()
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=1, temperature=0.0)
        answers = [sampler.sample(prompt(*one), num_samples=1, sampling_params=params) for one in unseen]
        drawn = [answer.result().sequences[0] for answer in answers]
        right = [sequence.tokens[0] == ANSWERS[kind] for sequence, (kind, _) in zip(drawn, unseen, strict=True)]
        assert sum(right) >= 13  # by chance 8
        for sequence, (kind, _), output in zip(drawn, unseen, trained.loss_fn_outputs, strict=True):
            if sequence.tokens[0] == ANSWERS[kind]:
                assert sequence.logprobs is not None
                assert sequence.logprobs[0] == pytest.approx(output["logprobs"].data[-1], abs=1e-4)
        again = service.create_training_client_from_state(client.save_state("trained").result().path).result()
        loaded = again.forward([datum(*one) for one in unseen], "cross_entropy").result()
        for found, wanted in zip(loaded.loss_fn_outputs, trained.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(found["logprobs"].data, wanted["logprobs"].data, atol=1e-5, rtol=0)
        scores = sampler.compute_logprobs(prompt(*unseen[0])).result()
        assert scores[0] is None
        assert all(score is not None for score in scores[1:])  # also at the picture's tokens

        with pytest.raises(tinker.TinkerError, match=r"expected_tokens: expected 9 tokens, got 8 from image"):
            client.forward([datum(0, 0, expected_tokens=9)], "cross_entropy").result()
        with pytest.raises(tinker.TinkerError, match=r"expected_tokens: expected 9 tokens, got 8 from image"):
            sampler.sample(prompt(0, 0, expected_tokens=9), num_samples=1, sampling_params=params).result()
