"""Which kernels a setting means on which device."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.grouped_lora import torch_grouped_mm
from tinsmith.modeling.kernels import choice, compiled, cpu
from tinsmith.modeling.kernels.choice import PLAIN, choose
from tinsmith.modeling.kernels.compiled import CannotCompile
from tinsmith.modeling.kernels.elementwise import EAGER, Elementwise
from tinsmith.modeling.kernels.flash_attn import FlashAttn
from tinsmith.modeling.kernels.varlen import TorchVarlen

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
COMPILED = replace(EAGER, name="compiled")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has an H100 and a compiler, but neither flash-attn nor liger-kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choice, "compiled", lambda device, dtype: COMPILED)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # importing it raises


def test_plain_is_none_anywhere_and_auto_needs_no_gpu() -> None:
    assert choose("plain", CUDA, torch.bfloat16) is PLAIN
    kernels = choose("auto", CPU, torch.float32)
    assert kernels.attention is None
    assert kernels.grouped_mm is None
    assert {choose("auto", CPU, dtype).elementwise for dtype in (torch.float32, torch.bfloat16)} == {cpu.CPU}


@pytest.mark.usefixtures("hopper")
def test_auto_takes_what_the_device_and_the_dtype_have(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = choose("auto", CUDA, torch.bfloat16)
    assert isinstance(kernels.attention, TorchVarlen)
    assert kernels.grouped_mm is torch_grouped_mm
    assert kernels.elementwise is COMPILED
    assert str(kernels) == "attention TorchVarlen, LoRA grouped, norms, rotations and SwiGLU compiled"
    assert choose("auto", CUDA, torch.float16).grouped_mm is None
    in_full = choose("auto", CUDA, torch.float32)
    assert in_full.attention is None
    assert in_full.grouped_mm is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose("auto", CUDA, torch.bfloat16).grouped_mm is None


@pytest.mark.usefixtures("hopper")
def test_packages_come_first_when_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(LigerRMSNormFunction=None, LigerSiLUMulFunction=None, LigerRopeFunction=None)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "attempt", lambda backend, device, dtype: None)
    monkeypatch.setattr(FlashAttn, "__init__", lambda self, interface: None)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    interface = ModuleType("flash_attn.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    kernels = choose("auto", CUDA, torch.bfloat16)
    assert isinstance(kernels.attention, FlashAttn)
    assert kernels.elementwise is not None
    assert kernels.elementwise.name == "liger"


@pytest.mark.usefixtures("hopper")
def test_a_liger_that_cannot_compile_gives_way_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton needs a C compiler for every kernel's first call."""
    ops = SimpleNamespace(LigerRMSNormFunction=None, LigerSiLUMulFunction=None, LigerRopeFunction=None)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)  # type: ignore[arg-type]

    def attempt(backend: Elementwise, device: torch.device, dtype: torch.dtype) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(choice, "attempt", attempt)
    assert choose("auto", CUDA, torch.bfloat16).elementwise is COMPILED
    assert "liger-kernel is installed but does not work here: Failed to find C compiler" in caplog.text
    with pytest.raises(ValueError, match="kernels: 'liger' does not work here: liger: Failed to find C compiler"):
        choose("liger", CUDA, torch.bfloat16)


@pytest.mark.usefixtures("hopper")
def test_a_flash_attn_that_is_another_gives_way_to_torch_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    interface = ModuleType("flash_attn.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    assert isinstance(choose("auto", CUDA, torch.bfloat16).attention, TorchVarlen)
    assert "_flash_attn_varlen_forward has no" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_auto_without_a_compiler_goes_on_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(device: torch.device, dtype: torch.dtype) -> Elementwise:
        raise CannotCompile("no C++ compiler")

    monkeypatch.setattr(choice, "compiled", none)
    caplog.set_level("INFO")
    assert choose("auto", CUDA, torch.bfloat16).elementwise is None
    assert [record.message.count("no C++ compiler") for record in caplog.records] == [1]
    with pytest.raises(ValueError, match="kernels: 'compiled' does not work here: compiled: no C"):
        choose("compiled", CPU, torch.float32)


def test_liger_is_refused_where_it_cannot_run(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="kernels: 'liger' does not work here: liger: its kernels run on CUDA, not on"):
        BaseModel.load(model_folder, device=CPU, dtype=torch.float32, kernels="liger")


def test_the_choice_is_logged_in_one_line(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    BaseModel.load(model_folder, device=CPU, dtype=torch.float32, kernels="plain")
    lines = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert lines == [
        f"kernels of {model_folder}: attention SDPA by length, LoRA one tenant after the other, "
        "norms, rotations and SwiGLU eager"
    ]


def test_an_error_of_torch_while_it_compiles_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("inductor raised:\nno compiler\n\nSet TORCH_LOGS")

    monkeypatch.setattr(compiled, "_compile", lambda function: broken)
    with pytest.raises(CannotCompile, match=r"^inductor raised: no compiler$"):
        compiled.compiled(CPU, torch.float32)
