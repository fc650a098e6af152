"""The second copy of the matrices: the same function, used only where it holds what the model holds."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.models import make_model
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel, positions_of
from tinsmith.modeling.full_weights import FullWeights, ParameterSwitch
from tinsmith.modeling.kernels import prepacked
from tinsmith.modeling.kernels.prepacked import Prepacked
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.self_check import only, random_adapter

pytestmark = pytest.mark.skipif(
    not prepacked.works(torch.float32, torch.device("cpu")), reason="this build of torch has no oneDNN"
)

LENGTHS = [5, 3, 9]


def load(folder: Path, *, prepack: bool) -> BaseModel:
    return BaseModel.load(folder, device=torch.device("cpu"), dtype=torch.float32, prepack=prepack)


@torch.inference_mode()
def run(base: BaseModel, runs: list[Run], lengths: list[int] = LENGTHS) -> Tensor:
    tokens = torch.randint(base.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    hidden = base.hidden_states(tokens, positions_of(lengths, base.device), Packed(lengths), runs)
    return logits(base.head, hidden, runs)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33, 63, 64])
@pytest.mark.parametrize("biased", [(False, False), (True, True), (True, False)])
def test_one_product_gives_the_outputs_of_all(num_rows: int, biased: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, num_rows, 16, generator=generator)
    weights = [torch.randn(size, 16, generator=generator) for size in (8, 24)]
    biases = [torch.randn(len(w), generator=generator) if has else None for w, has in zip(weights, biased, strict=True)]
    for y, weight, bias in zip(Prepacked(weights, biases)(x), weights, biases, strict=True):
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_copies_computes_the_same(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path, tie_word_embeddings=tied)
    plain, copied = load(folder, prepack=False), load(folder, prepack=True)
    assert copied.head.prepacked is not None
    assert plain.head.prepacked is None
    groups = [
        random_adapter(only(group, rank=2, seed=n), plain.targets, plain.device) for n, group in enumerate(plain.groups)
    ]
    rows = [slice(0, 5), torch.tensor([5, 7, 16]), slice(8, 15)]
    for runs in ([], [Run(adapter, where) for adapter, where in zip(groups, rows, strict=True)]):
        torch.testing.assert_close(run(copied, runs), run(plain, runs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run(copied, [], [1]), run(plain, [], [1]), atol=1e-5, rtol=1e-5)


def test_a_version_of_all_parameters_is_not_answered_from_the_copies(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    plain, copied = load(folder, prepack=False), load(folder, prepack=True)
    own = run(copied, [])
    numel = sum(parameter.numel() for parameter in plain.parameters.values())
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 0.1
    answers = []
    for base in (plain, copied):
        parameters = ParameterSwitch(base)
        parameters.use(FullWeights(base, flat))
        answers.append(run(base, []))
        parameters.use(None)
    torch.testing.assert_close(answers[1], answers[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(answers[1], own)
    assert torch.equal(run(copied, []), own)


_MEMORY = """
import ctypes, torch
from tinsmith.modeling.kernels.prepacked import Prepacked
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
torch.set_num_threads(1)
product = Prepacked([torch.randn(48, 32)], [None])
before = mallinfo2().uordblks
for num_rows in range(1, 401):
    x = torch.randn(num_rows, 32)
    if product.gains(x):
        product(x)
print((mallinfo2().uordblks - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's count of what is in use")
def test_memory_does_not_grow_with_each_number_of_rows() -> None:
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 30  # with all of them some 220


def test_the_copy_is_left_out_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "fits_in_memory", lambda num_bytes: False)
    base = BaseModel.load(make_model(tmp_path), device=torch.device("cpu"), dtype=torch.float32, prepack=None)
    assert base.head.prepacked is None
