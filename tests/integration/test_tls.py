"""`tinsmith up --certificates`: all calls between client, gateway, trainer and sampler are encrypted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import tinker

from tests.support.certificates import make
from tests.support.examples import BASE_MODEL, PROMPT, batch, new_model, train
from tests.support.stack import Stack
from tinsmith.rpc.channel import connect, is_serving
from tinsmith.rpc.tls import Certificates
from tinsmith_cli import main

pytestmark = pytest.mark.slow


async def reaches(address: str, certificates: Certificates | None) -> bool:
    async with connect(address, certificates=certificates) as channel:
        return await is_serving(channel)


def test_the_sdk_trains_publishes_and_samples_and_nobody_gets_in_without_a_certificate(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "certificates")
    monkeypatch.setenv("SSL_CERT_FILE", str(made.good / "ca.pem"))
    flags = ["--certificates", str(made.good), "--api-key", "tml-secret"]
    with Stack(tmp_path / "state", base_models=[f"{BASE_MODEL}={toy}"], flags=flags) as stack:
        assert stack.base_url.startswith("https://")
        with tinker.ServiceClient(base_url=stack.base_url, api_key="tml-secret") as service:
            client = new_model(service, rank=4)
            train(client, batch(1), steps=1, adam=tinker.AdamParams(learning_rate=1e-3))
            sampler = client.save_weights_and_get_sampling_client().result()
            prompt = tinker.ModelInput.from_ints(PROMPT)
            sampled = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=3)).result()
            assert len(sampled.sequences[0].tokens) == 3
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http{stack.base_url.removeprefix('https')}/api/v1/healthz", trust_env=False)
        for address in (stack.trainers[0], stack.samplers[0]):
            for certificates, expected in (
                (made.certificates("client"), True),
                (made.certificates("client", made.expired), False),
                (made.certificates("client", made.foreign), False),
                (None, False),
            ):
                assert asyncio.run(reaches(address, certificates)) is expected


def test_up_refuses_certificates_that_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--certificates", str(tmp_path)], "`tinsmith make-certificates"),
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key belong together"),
    ):
        assert main(["up", "--state-dir", str(tmp_path / "state"), *flags]) == 2
        assert message in capsys.readouterr().err
