"""Each setting of `tinsmith up` is stated once, and reaches the services that it names."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from gateway.config import GatewayConfig
from sampler_service.config import SamplerConfig
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.settings import Settings
from trainer_service.config import TrainerConfig

CONFIGS = {"trainer": TrainerConfig, "sampler": SamplerConfig, "gateway": GatewayConfig}


def parsed(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    Settings.add_flags(parser)
    return Settings.of(parser.parse_args(argv))


@pytest.mark.parametrize("service", CONFIGS)
def test_a_setting_that_a_service_gets_is_one_of_its_own(service: str) -> None:
    passed = {each.name for each in fields(Settings) if service in each.metadata["to"]}
    assert passed
    assert passed <= CONFIGS[service].model_fields.keys()


def test_no_flags_are_the_defaults() -> None:
    assert parsed() == Settings()


def test_set_options_are_passed_on_and_others_are_left_to_the_services_environment() -> None:
    logs = {"log-level": "INFO", "log-format": "json"}
    assert parsed().passed_to("trainer") == parsed().passed_to("gateway") == logs
    some = parsed("--deterministic", "--max-lora-rank", "8", "--tracing", "--log-format", "text")
    assert some.passed_to("trainer") == {
        "deterministic": "true",
        "max-lora-rank": "8",
        "log-level": "INFO",
        "log-format": "text",
        "tracing": "true",
    }
    assert parsed("--no-share-prefixes").passed_to("trainer")["share-prefixes"] == "false"
    assert parsed("--share-prefixes").passed_to("trainer")["share-prefixes"] == "true"
    assert some.passed_to("sampler").keys() == some.passed_to("trainer").keys() - {"deterministic"}


def test_the_folder_of_checkpoints_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_CHECKPOINT_DIR", "s3://bucket")
    assert parsed().checkpoint_dir == "s3://bucket"
    assert parsed("--checkpoint-dir", "here").checkpoint_dir == "here"


@pytest.mark.parametrize(
    "flag", [f"--{each.name.replace('_', '-')}" for each in fields(Settings) if each.metadata["least"]]
)
def test_a_number_below_the_least_is_refused_by_name_and_value(flag: str) -> None:
    with pytest.raises(UsageError, match=rf"^{flag}: 0(\.0)? is not at least 1$"):
        parsed(flag, "0")
