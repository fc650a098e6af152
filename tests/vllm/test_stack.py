"""`tinsmith up --engine vllm`, as a user with vLLM installed starts it: trained, published, sampled through the SDK."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from tests.support.stack import Stack
from tests.vllm.seeing import HIGH, WIDE, chunk, make
from tests.vllm.service import PYTHON

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    # The SDK leaves sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed (transport )?<:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "tests/tiny"


@pytest.fixture(scope="module")
def folder(toy: Path) -> Path:
    return toy


@contextmanager
def running(folder: Path, state_dir: Path, *flags: str, tensor_parallel: int = 1) -> Iterator[Stack]:
    assert PYTHON.exists(), "make test-vllm makes it"
    env = {
        "SAMPLER_MAX_KV_TOKENS": "4096",
        "SAMPLER_PREFIX_CACHE_BYTES": "1000000",
        "SAMPLER_DEVICE": "cpu",
        "SAMPLER_TENSOR_PARALLEL": str(tensor_parallel),
    }
    with Stack(
        state_dir,
        base_models=[f"{MODEL}={folder}"],
        flags=["--engine", "vllm", *flags],
        env=env,
        python=str(PYTHON),
    ) as stack:
        yield stack


def test_all_parameters_are_trained_published_and_sampled(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path, "--full-training") as stack:
        train_publish_and_sample(stack, rank=0)


def test_two_workers_sample_what_was_trained_and_do_so_again_when_one_was_killed(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path, tensor_parallel=2) as stack:
        sample = train_publish_and_sample(stack, rank=8)
        before = sample()
        processes = psutil.Process(stack.process.pid).children(recursive=True)
        workers = {one.cmdline()[0]: one for one in processes if "Worker_TP" in one.cmdline()[0]}
        assert len(workers) == 2
        workers["VLLM::Worker_TP1"].kill()
        after = sample()  # the supervisor has started the sampler again, and the version has been published again
        assert [one.tokens for one in after.sequences] == [one.tokens for one in before.sequences]
        assert not any(one.is_running() for one in workers.values())


def train_publish_and_sample(stack: Stack, *, rank: int) -> Callable[[], types.SampleResponse]:
    """Gives what samples the last version again."""
    service = tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test")
    trainer = service.create_lora_training_client(base_model=MODEL, rank=rank, seed=0).result()
    tokens = np.random.default_rng(0).integers(2000, size=24).tolist()
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=16, seed=1, temperature=1.0)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},  # type: ignore[arg-type]
    )
    before, sampler = None, None

    def sample() -> types.SampleResponse:
        assert sampler is not None
        return sampler.sample(prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True).result()

    for _ in range(2):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=0.05 if rank else 0.01)).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        response = sample()
        forward = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        assert response.prompt_logprobs is not None
        np.testing.assert_allclose(np.array(response.prompt_logprobs[1:], np.float32), forward, atol=1e-3)
        assert before is None or np.abs(before - forward).max() > 0.1
        before = forward
        for sequence in response.sequences:  # what was drawn is what the trainer thinks of it
            assert sequence.logprobs is not None
            whole = [*tokens, *sequence.tokens]
            scored = types.Datum(
                model_input=types.ModelInput.from_ints(whole[:-1]),
                loss_fn_inputs={"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)},  # type: ignore[arg-type]
            )
            output = trainer.forward([scored], "cross_entropy").result().loss_fn_outputs[0]
            drawn = output["logprobs"].to_numpy()[-len(sequence.tokens) :]
            np.testing.assert_allclose(np.array(sequence.logprobs, np.float32), drawn, atol=1e-3)
    base = service.create_sampling_client(base_model=MODEL).result()
    assert len(base.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens) > 0
    return sample


def test_a_run_trained_on_pictures_is_sampled_with_them(tmp_path: Path) -> None:
    """The trainer computes the logprobs of a sample's tokens after a picture as vLLM did. The canary has certified the
    version."""
    model = make(tmp_path / "model")
    with running(model, tmp_path / "state") as stack:
        service = tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test")
        trainer = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0).result()
        shown = [
            types.EncodedTextChunk(tokens=[7, 11]),
            types.ImageChunk(data=chunk(WIDE).image.data, format="png", expected_tokens=15),
            types.EncodedTextChunk(tokens=[20, 21]),
            types.ImageChunk(data=chunk(HIGH).image.data, format="png"),
            types.EncodedTextChunk(tokens=[22]),
        ]
        prompt = types.ModelInput(chunks=shown)

        def datum(answer: list[int], weights: list[float]) -> types.Datum:
            whole = types.ModelInput(chunks=[*shown, types.EncodedTextChunk(tokens=answer[:-1])])
            before = [0] * (2 + 15 + 2 + 8)
            return types.Datum(
                model_input=whole,
                loss_fn_inputs={"target_tokens": [*before, *answer], "weights": [*map(float, before), *weights]},  # type: ignore[arg-type]
            )

        answer = [40, 41, 42, 43]
        losses = []
        for _ in range(30):
            result = trainer.forward_backward([datum(answer, [1.0] * 4)], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
            losses.append(result.result().metrics["loss:sum"])
        assert losses[-1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, temperature=0.0)
        (greedy,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
        drawn = sampler.sample(prompt, num_samples=3, sampling_params=types.SamplingParams(max_tokens=4, seed=1))
        for sequence in [greedy, *drawn.result().sequences]:
            assert sequence.logprobs is not None
            output = trainer.forward([datum(sequence.tokens, [1.0] * 4)], "cross_entropy").result().loss_fn_outputs[0]
            theirs = output["logprobs"].to_numpy()[-4:]
            np.testing.assert_allclose(np.array(sequence.logprobs, np.float32), theirs, atol=1e-3)
        scores = sampler.compute_logprobs(prompt).result()
        assert scores[0] is None
        assert all(score is not None for score in scores[1:])  # also at the pictures' tokens

        adapting = service.create_lora_training_client(
            base_model=MODEL, rank=8, seed=0, user_metadata={"train_vision": "true"}
        )
        with pytest.raises(tinker.TinkerError, match=r"lora_config.train_vision: .* never published: the sampler at"):
            adapting.result()
