"""The device that the tests of this folder compare with the CPU."""

from __future__ import annotations

import os

import pytest
import torch

CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("TINSMITH_GPU_TESTS", "cuda"))
"""`TINSMITH_GPU_TESTS=cpu` shows on a machine without a GPU that the tests themselves run."""

MARKS = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch says what could be faster, such as TF32, which is no error
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
]
ONLY_CUDA = pytest.mark.skipif(DEVICE.type != "cuda", reason="this has no form for a CPU")
"""For tests of what exists on CUDA alone; MARKS skips them where there is no CUDA device."""
