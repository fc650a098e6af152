"""The whole stack with its checkpoints in a bucket."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import tinker
from tinker import ModelInput

from tests.support.examples import BASE_MODEL, PROMPT, batch, forward, new_model, random_tokens, train
from tests.support.stack import Stack
from tests.support.stores import BUCKET, file_system, s3
from tinsmith_cli import main

pytestmark = pytest.mark.slow


def test_training_saving_sampling_and_resuming_with_an_object_store(toy: Path, tmp_path: Path) -> None:
    with s3() as env, mock.patch.dict(os.environ, env):
        objects = file_system("s3")
        flags = ["--checkpoint-dir", f"s3://{BUCKET}/run"]
        with (
            Stack(tmp_path, base_models=[f"{BASE_MODEL}={toy}"], flags=flags, env=env) as stack,
            tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service,
        ):
            client = new_model(service, rank=4)
            train(client, batch(2), steps=2)
            path = client.save_state("stored").result().path
            sampler = client.save_weights_and_get_sampling_client().result()
            params = tinker.SamplingParams(max_tokens=3)
            sampler.sample(ModelInput.from_ints(PROMPT), 1, params).result()
            resumed = service.create_training_client_from_state_with_optimizer(path).result()
            tokens = random_tokens(20, 1)
            assert (forward(resumed, tokens)[0] == forward(client, tokens)[0]).all()
            service.create_sampling_client(model_path=path).result().sample(
                ModelInput.from_ints(PROMPT), 1, params
            ).result()  # from its files
            keys = ("--base-url", stack.base_url, "--api-key", "tml-test")
            assert main(["checkpoints", "verify", path, *keys]) == 0
            assert main(["checkpoints", "export", path, str(tmp_path / "out"), *keys]) == 0
            (weights,) = (key for key in objects.find(f"{BUCKET}/run") if f"{path[9:]}/" in key and "_model" in key)
            assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == objects.cat_file(weights)
            rest = tinker.RestClient(base_url=stack.base_url, api_key="tml-test")
            rest.delete_checkpoint_from_tinker_path(path).result()
            assert not [key for key in objects.find(f"{BUCKET}/run") if path[9:] in key]


def test_a_missing_bucket_ends_the_start_with_its_name(toy: Path, tmp_path: Path) -> None:
    flags = ["--checkpoint-dir", "s3://missing/run", "--no-supervise"]
    with (
        s3() as env,
        pytest.raises(RuntimeError, match="checkpoint_dir s3://missing/run cannot be used: there is no such bucket"),
        Stack(tmp_path, base_models=[f"{BASE_MODEL}={toy}"], flags=flags, env=env),
    ):
        pass
