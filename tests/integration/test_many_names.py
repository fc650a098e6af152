"""Several public names, and several base models, behind one gateway."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker

from tests.support.examples import PROMPT, batch, forward, score, train
from tests.support.stack import Stack, make_base_model


@pytest.mark.slow  # five processes
def test_names_share_a_folder_and_folders_do_not_share_a_trainer(toy: Path, tmp_path: Path) -> None:
    other = make_base_model(tmp_path / "other", seed=1)
    models = [f"first/name={toy}", f"second/name={toy}", f"third/name={other}", f"{toy}={toy}"]
    with (
        Stack(tmp_path / "state", base_models=models) as stack,
        tinker.ServiceClient(base_url=stack.base_url, api_key="tml-test") as service,
    ):
        names = ["first/name", "second/name", "third/name"]
        assert set(stack.models) == {*names, str(toy)}
        modules = [process.cmdline()[3] for process in stack.processes()]
        assert sorted(modules) == ["gateway", *["sampler_service"] * 2, *["trainer_service"] * 2]
        rest = tinker.RestClient(base_url=stack.base_url, api_key="tml-test")
        served = [model.model_name for model in rest.get_server_capabilities().result().supported_models]
        assert served == sorted([*names, str(toy)])

        # A name that is a folder: the SDK finds the tokenizer there, without a hub.
        by_folder = service.create_lora_training_client(str(toy), rank=4, seed=0).result()
        sampler = service.create_sampling_client(base_model=str(toy)).result()
        for tokenizer in (by_folder.get_tokenizer(), sampler.get_tokenizer()):
            assert tokenizer.decode(tokenizer.encode("one text")) == "one text"

        clients = [service.create_lora_training_client(name, rank=4, seed=0).result() for name in names]
        assert [client.get_info().model_data.model_name for client in clients] == names
        first, second, third = (forward(client, PROMPT)[0] for client in clients)
        np.testing.assert_array_equal(first, second)
        assert np.abs(first - third).max() > 0.1
        for client in clients:
            train(client, batch(1), steps=2)
            sampler = client.save_weights_and_get_sampling_client().result()
            np.testing.assert_allclose(score(sampler, PROMPT), forward(client, PROMPT)[0], atol=1e-4)
        path = clients[0].save_state("shared").result().path
        under_another_name = service.create_training_client_from_state(path, base_model="second/name").result()
        np.testing.assert_array_equal(forward(under_another_name, PROMPT), forward(clients[0], PROMPT))
        with pytest.raises(tinker.RequestFailedError, match="third/name"):
            service.create_training_client_from_state(path, base_model="third/name").result()
