import json
from pathlib import Path

import pytest

from tinsmith_cli.base_models import ServedModel, UsageError, parse


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_alone_is_served_under_its_own_name(model: Path) -> None:
    assert parse([str(model)]) == [ServedModel(str(model), ("qwen",))]


def test_a_hub_id_alone_is_its_own_name() -> None:
    assert parse(["Qwen/Qwen3-0.6B"]) == [ServedModel("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B",))]


def test_a_name_can_stand_for_a_hub_id() -> None:
    assert parse(["mine=Qwen/Qwen3-0.6B"]) == [ServedModel("Qwen/Qwen3-0.6B", ("mine",))]


def test_names_of_one_folder_load_it_once_even_through_a_link(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(model)
    specs = [f"Qwen/Qwen3-8B={model}", "other/model", f"Qwen/Qwen3-8B-Base={link}", f"Qwen/Qwen3-8B={model}/"]
    assert parse(specs) == [
        ServedModel(str(model), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")),
        ServedModel("other/model", ("other/model",)),
    ]


def test_a_models_file_adds_its_names(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"a": str(model), "b": str(model)}))
    assert parse([], models_file=file) == [ServedModel(str(model), ("a", "b"))]


def test_a_path_may_hold_an_equals_sign(model: Path) -> None:
    folder = model.rename(model.with_name("lr=3"))
    assert parse([f"name={folder}"]) == [ServedModel(str(folder), ("name",))]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("=/x", "'=/x' is not NAME=PATH"),
        ("name=", "'name=' is not NAME=PATH"),
        ("/no/such/folder", "/no/such/folder is neither a folder nor a hub id"),
        ("name=./nothing", "./nothing is neither a folder nor a hub id"),
        ("nothing", "nothing is neither a folder nor a hub id"),
        ("/", "holds no config.json"),
    ],
)
def test_a_bad_spec_is_refused_by_value(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse([spec])


def test_one_name_for_two_models_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="a name has one model"):
        parse([f"name={model}", "name=Qwen/Qwen3-0.6B"])


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 1}'])
def test_a_bad_models_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="--models-file"):
        parse([], models_file=file)


@pytest.mark.parametrize(
    ("file", "lacks"),
    [
        ("tokenizer.json", False),
        ("tokenizer.model", False),
        ("vocab.json", False),
        ("qwen.tiktoken", False),
        ("tokenizer_config.json", True),
        ("model.safetensors", True),
    ],
)
def test_a_folder_without_files_of_a_tokenizer_is_told_from_others(tmp_path: Path, file: str, lacks: bool) -> None:
    (tmp_path / file).touch()
    assert ServedModel(str(tmp_path), ("a",)).lacks_tokenizer is lacks
    assert not ServedModel("Qwen/Qwen3-0.6B", ("a",)).lacks_tokenizer
