"""Each setting of `tinsmith up` is stated once, and reaches the services that it names."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
from pydantic import ValidationError

from gateway.config import GatewayConfig
from sampler_service.choice import settled
from sampler_service.config import SamplerConfig
from tinsmith_cli.base_models import UsageError
from tinsmith_cli.settings import Settings, flag_of
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
    assert parsed().passed_to("trainer") == parsed().passed_to("gateway") == {}
    some = parsed("--deterministic", "--max-lora-rank", "8", "--tracing", "--log-format", "text")
    assert some.passed_to("trainer") == {
        "deterministic": "true",
        "max-lora-rank": "8",
        "log-format": "text",
        "tracing": "true",
    }
    assert parsed("--no-share-prefixes").passed_to("trainer")["share-prefixes"] == "false"
    assert parsed("--share-prefixes").passed_to("trainer")["share-prefixes"] == "true"
    assert [parsed("--no-pictures").passed_to(one)["pictures"] for one in ("trainer", "sampler")] == ["false", "false"]
    assert some.passed_to("sampler").keys() == some.passed_to("trainer").keys() - {"deterministic"}


def test_variables_that_a_flag_decides_are_settings() -> None:
    settings = {f"{service}_{name}".upper() for service, config in CONFIGS.items() for name in config.model_fields}
    decided = [variable for each in fields(Settings) for variable in each.metadata["decides"]]
    assert set(decided) <= settings
    assert len(set(decided)) == len(decided)
    assert (flag_of("TRAINER_NUM_THREADS"), flag_of("GATEWAY_TRACING")) == ("--trainer-threads", "--tracing")


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


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantize_reaches_trainer_and_sampler(quantize: str) -> None:
    settings = parsed("--quantize", quantize)
    for service, config in CONFIGS.items():
        passed = settings.passed_to(service)
        assert passed.get("quantize") == (quantize if service in ("trainer", "sampler") else None)
        if "quantize" in passed:
            assert config.model_validate({"base_model": "x", "quantize": passed["quantize"]}).quantize == quantize  # type: ignore[attr-defined]


def test_fp8_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--quantize", "fp8")
    assert "argument --quantize: 'fp8' is not supported: " in capsys.readouterr().err
    for config in (TrainerConfig, SamplerConfig):
        with pytest.raises(ValidationError, match=r"'fp8' is not supported: .* set it to 'int8'"):
            config(base_model="x", quantize="fp8")  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match="Input should be 'int8' or 'nf4'"):
            config(base_model="x", quantize="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [["--full-training"], ["--engine", "vllm"]])
def test_quantize_is_refused_before_anything_starts_where_it_cannot_be(other: list[str]) -> None:
    with pytest.raises(UsageError, match=f"^--quantize: nf4 is not possible together with {' '.join(other)}; leave"):
        parsed("--quantize", "nf4", *other)


def test_the_services_refuse_what_quantised_weights_cannot_be() -> None:
    for settings in ({"full_training": True}, {"tensor_parallel": 2}, {"shard_base": True}):
        with pytest.raises(
            ValidationError, match=f"quantize: nf4 is not possible together with {next(iter(settings))}"
        ):
            TrainerConfig(base_model="x", quantize="nf4", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r'quantize: int8 is for engine "torch"; engine "vllm" would'):
        SamplerConfig(base_model="x", quantize="int8", engine="vllm")
    with pytest.raises(ValidationError, match="quantize: int8 leaves no matrices to prepack"):
        SamplerConfig(base_model="x", quantize="int8", prepack=True)


def test_a_quantised_sampler_takes_the_torch_engine_where_auto_would_take_vllm() -> None:
    config, why = settled(SamplerConfig(base_model="x", quantize="nf4", device="cuda"))
    assert (config.engine, why) == ("torch", "the setting quantize is nf4, which vLLM cannot do")


TOKEN = ["--join", "10.0.0.1:8100/token"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--role", "trainer,painter"], "--role: 'painter' is no service; give some of gateway,trainer,sampler"),
        (["--address", "10.0.0.1", "--role", "trainer"], "--role: trainer leaves out gateway"),
        (["--address", "0.0.0.0"], "--address: 0.0.0.0 is no address under which other machines reach this one"),
        (["--address", "10.0.0.1", "--role", "gateway", "--trainer-nodes", "2"], "--trainer-nodes: 2 is for machines"),
        (TOKEN, "--join: say with --role what this machine runs"),
        ([*TOKEN, "--role", "gateway"], "--role: a further gateway needs the first one's database"),
        ([*TOKEN, "--role", "sampler", "--host", "0.0.0.0"], "--host: is for the first machine"),
        ([*TOKEN, "--role", "sampler", "--api-key", "k"], "--api-key: is for the first machine"),
        ([*TOKEN, "--role", "sampler", "--certificates", "c"], "--certificates: is for the first machine"),
        (["--trainer-nodes", "0"], "--trainer-nodes: 0 is not at least 1"),
    ],
)
def test_settings_of_several_machines_that_do_not_go_together_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--role", "sampler"], "--role: is for several machines; give --address on the first one"),
        (["--trainer-nodes", "2"], "--trainer-nodes: is for several machines"),
        (["--replace"], "--replace: is for several machines"),
        (["--address", "10.0.0.1"], "--address: name the base model that all machines serve"),
    ],
)
def test_up_refuses_a_part_of_a_deployment_without_the_rest(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(*argv).check_up()


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_JOIN", TOKEN[1])
    settings = parsed("--role", "trainer,sampler")
    settings.check_up()
    assert (settings.join, settings.roles) == (TOKEN[1], ("trainer", "sampler"))


def test_settings_that_must_be_alike_are_those_of_the_first_machine() -> None:
    first = parsed("--dtype", "bfloat16", "--max-lora-rank", "16", "--full-training")
    shared = first.shared()
    assert shared == {"dtype": "bfloat16", "max-lora-rank": "16", "full-training": "True"}
    further = parsed().with_shared(shared)
    assert (further.dtype, further.max_lora_rank, further.full_training) == ("bfloat16", 16, True)
    assert parsed().shared() == {}
