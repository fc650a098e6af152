"""Adapters from elsewhere and to elsewhere, against the real stack: stock PEFT on one side, the SDK on the other."""

import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import peft
import pyrage
import pytest
import tinker
import torch
from tinker import ModelInput
from transformers import AutoModelForCausalLM

from tests.support.examples import (
    BASE_MODEL,
    PROMPT,
    Floats,
    batch,
    forward,
    new_model,
    random_tokens,
    score,
    train,
)
from tests.support.stack import Stack
from tests.support.wire import Wire

TOKENS = random_tokens(30, 3)


def peft_logprobs(base: Path, adapter: Path | None) -> Floats:
    """log P of each of TOKENS but the first, by stock transformers and PEFT."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings(action="ignore"):
            model = peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        table = model.eval()(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return table[:-1].gather(1, torch.tensor(TOKENS)[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def made_elsewhere(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that stock PEFT has made and trained."""
    folder = tmp_path_factory.mktemp("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    tokens = torch.tensor([TOKENS])
    for _ in range(5):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def imported(stack: Stack, made_elsewhere: Path) -> str:
    """Its path, once the command line has imported it."""
    command = ["checkpoints", "import", made_elsewhere, "--name", "elsewhere", "--base-url", stack.base_url]
    command += ["--base-model", BASE_MODEL, "--ttl", "2h"]
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith_cli", *map(str, command)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    path, *notes = done.stdout.splitlines()
    assert any("k_proj" in note and "start at zero" in note for note in notes)
    return path


def test_an_imported_adapter_computes_what_peft_computes_and_trains_on(
    service: tinker.ServiceClient, imported: str, made_elsewhere: Path, toy: Path
) -> None:
    client = service.create_training_client_from_state(imported).result()
    expected = peft_logprobs(toy, made_elsewhere)
    np.testing.assert_allclose(forward(client, TOKENS)[0], expected, atol=1e-4)
    assert np.abs(expected - peft_logprobs(toy, None)).max() > 0.1
    losses = train(client, batch(4), steps=4)
    assert losses[-1] < losses[0]
    exported = client.save_state("trained-on").result().path
    assert exported.endswith("/weights/trained-on")


def test_an_imported_adapter_is_listed_and_sampled_from(
    stack: Stack, service: tinker.ServiceClient, imported: str, made_elsewhere: Path, toy: Path
) -> None:
    rest = tinker.RestClient(base_url=stack.base_url, api_key="tml-test")
    run_id = imported.removeprefix("tinker://").split("/")[0]
    run = rest.get_training_run(run_id).result()
    assert (run.base_model, run.lora_rank) == (BASE_MODEL, 8)
    assert [one.tinker_path for one in rest.list_checkpoints(run_id).result().checkpoints] == [imported]
    assert rest.get_weights_info_by_tinker_path(imported).result().lora_rank == 8
    sampler = service.create_sampling_client(model_path=imported).result()
    np.testing.assert_allclose(score(sampler, TOKENS), peft_logprobs(toy, made_elsewhere), atol=1e-4)
    sampler.sample(ModelInput.from_ints(PROMPT), 1, tinker.SamplingParams(max_tokens=3)).result()


def test_an_adapter_that_is_no_plain_lora_is_refused_by_name(wire: Wire, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "use_dora": true}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    command = ["checkpoints", "import", str(tmp_path), "--name", "dora", "--base-url", wire.base_url]
    command += ["--base-model", BASE_MODEL]
    done = subprocess.run([sys.executable, "-m", "tinsmith_cli", *command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "use_dora = true cannot be imported" in done.stderr


def test_an_export_is_what_peft_loads_and_only_its_recipient_can_read_it_encrypted(
    stack: Stack, service: tinker.ServiceClient, toy: Path, tmp_path: Path
) -> None:
    client = new_model(service, 4, train_unembed=False)  # a tied output layer has another name there
    train(client, batch(5), steps=2, adam=tinker.AdamParams(learning_rate=5e-3))
    expected = forward(client, TOKENS)[0]
    assert np.abs(expected - peft_logprobs(toy, None)).max() > 0.01
    identity = pyrage.x25519.Identity.generate()  # type: ignore[attr-defined]  # it comes without types
    plain = client.save_weights_external("plain").result().path
    secret = client.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())]).result().path
    rest = tinker.RestClient(base_url=stack.base_url, api_key="tml-test")
    for path, suffix in ((plain, ""), (secret, ".age")):
        folder = tmp_path / f"files{suffix}"
        folder.mkdir()
        urls = rest.get_external_weights_urls(path).result().urls
        assert set(urls) == {f"adapter_config.json{suffix}", f"adapter_model.safetensors{suffix}"}
        for name, url in urls.items():
            with urllib.request.urlopen(url, timeout=30) as response:
                data = response.read()
            if suffix:
                data = pyrage.decrypt(data, [identity])  # type: ignore[attr-defined]
            (folder / name.removesuffix(".age")).write_bytes(data)
        np.testing.assert_allclose(peft_logprobs(toy, folder), expected, atol=1e-4)
