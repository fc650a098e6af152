from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from sampler_service.config import SamplerConfig
from tests.support.forking import command, run


def test_the_public_name_defaults_to_the_path() -> None:
    assert CliApp.run(SamplerConfig, ["--base-model", "/m"]).model_names == ("/m",)


def test_names_come_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--base-model", "/m", "--model-names", '["a/b", "c"]', "--listen", "[::1]:5", "--num-threads", "2"]
    config = CliApp.run(SamplerConfig, flags)
    assert (config.model_names, config.host, config.num_threads) == (("a/b", "c"), "[::1]", 2)
    monkeypatch.setenv("SAMPLER_BASE_MODEL", "/n")
    monkeypatch.setenv("SAMPLER_MODEL_NAMES", '["x"]')
    assert CliApp.run(SamplerConfig, []).model_names == ("x",)


@pytest.mark.slow
async def test_the_first_line_of_the_log_names_the_engine_and_why(tmp_path: Path) -> None:
    """This sampler has no model and cannot go on, so the line is written before anything is loaded."""
    argv = ["--base-model", str(tmp_path), "--listen", "127.0.0.1:0", "--engine", "torch"]
    done = await run(command, "sampler_service", argv)
    assert "engine torch: the setting engine names it" in done.output.splitlines()[0]
    assert done.status == 1


@pytest.mark.parametrize(
    "settings", [{"listen": "nowhere"}, {"max_running": 0}, {"device": "tpu"}, {"colour": "red"}], ids=str
)
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SamplerConfig(base_model="/m", **settings)
