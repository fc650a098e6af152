import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tinsmith.toy.model import RECIPE_FILE
from tinsmith_cli import main


def make(out: Path, *flags: str) -> int:
    return main(["make-base-model", "--size", "tiny", "--out", str(out), *flags])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    assert make(out, "--pretrain-steps", "2") == 0
    return out


def test_the_ordinary_libraries_load_it(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.float32
    assert 0.9e6 < model.num_parameters() < 1.2e6
    assert model.config.vocab_size % 64 == 0
    assert len(tokenizer) <= model.config.vocab_size
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.eos_token_id == ends[0]
    prompt = tokenizer("What is 3 + 4?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_the_chat_template_writes_qwens_turns(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [{"role": "user", "content": "Hi"}]
    asked = "<|im_start|>user\nHi<|im_end|>\n"
    render = tokenizer.apply_chat_template
    assert render(messages, tokenize=False) == asked
    assert render(messages, tokenize=False, add_generation_prompt=True) == asked + "<|im_start|>assistant\n"
    assert render(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False) == (
        asked + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_any_text_survives_the_tokenizer_and_chat_tokens_are_one_id_each(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "<think>\n42 naïve 東京 🙂\n</think>\n\n<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"):
        assert len(tokenizer.encode(token)) == 1


def test_the_same_settings_give_the_same_files(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(tmp_path / "again", "--pretrain-steps", "2") == 0
    assert "loss" in capsys.readouterr().out
    assert make(tmp_path / "other", "--pretrain-steps", "2", "--seed", "1") == 0
    files = sorted(file.name for file in tiny.iterdir())
    assert files == sorted(file.name for file in (tmp_path / "again").iterdir())
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tiny / name).read_bytes(), name
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()


def test_a_finished_model_is_left_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert make(tiny, "--pretrain-steps", "2") == 0
    assert "already holds this model" in capsys.readouterr().out
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("content", [None, json.dumps({"size": "small"})])
def test_a_folder_with_something_else_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    if content:
        (tmp_path / RECIPE_FILE).write_text(content)
    assert make(tmp_path) == 2
    assert f"--out: {tmp_path} is not empty" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("num_bytes", [10_000, 1_000_000], ids=["the tokenizer", "the weights"])
def test_a_full_disk_is_said_in_one_line_and_leaves_nothing_behind(
    num_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer, which is written first, has some 100 kB, and the weights have 4 MB."""
    monkeypatch.setattr("tinsmith.toy.tokenizer._TRAINING_DOCUMENTS", 1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        assert make(tmp_path / "tiny") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err.startswith(f"tinsmith: --out: {tmp_path / 'tiny'} cannot be written: ")
    assert list(tmp_path.iterdir()) == []


def test_training_longer_gives_a_lower_loss(tiny: Path, toy: Path) -> None:
    """Two steps and twenty."""
    tokens = AutoTokenizer.from_pretrained(tiny)("<|im_start|>user\nWhat is 3 + 4?<|im_end|>", return_tensors="pt")

    def loss(folder: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder)
        return model(**tokens, labels=tokens["input_ids"]).loss.item()

    assert loss(toy) < loss(tiny) - 1


@pytest.mark.parametrize("flags", [["--pretrain-seconds", "-1"], ["--pretrain-steps", "0"], ["--size", "huge"]])
def test_bad_flags_are_refused(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        make(tmp_path / "model", *flags)
    assert ended.value.code == 2


def test_ctrl_c_ends_it_without_a_traceback_and_leaves_nothing(tmp_path: Path) -> None:
    settings = ["--size", "tiny", "--pretrain-steps", "1000000", "--out", str(tmp_path / "model")]
    program = (
        "from tinsmith.toy import model, tokenizer; model._REPORT_INTERVAL_S = 0.0; "
        "tokenizer._TRAINING_DOCUMENTS = 1000; import tinsmith_cli.__main__"
    )
    command = [sys.executable, "-c", program, "make-base-model", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("pre-training" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False), errors
    assert list(tmp_path.iterdir()) == []
