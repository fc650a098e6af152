"""Memory that is counted, the part of it that may be used, and the errors that say that there is none."""

import pytest
import torch

from tests.unit.trainer_service.engines import batch, create, run
from tinsmith.faults import is_out_of_memory
from tinsmith.modeling import logprobs
from tinsmith.modeling.base_model import BaseModel
from tinsmith.sizing import models_bytes
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.memory import Allocations, drop_caches


def test_storages_count_once_from_their_making_to_their_end() -> None:
    outside = torch.ones(100)
    with Allocations() as allocations:
        a = outside + 1
        view = a[:50]
        a.add_(1)
        assert allocations.live_bytes == 400
        b = torch.cat([a, view])
        assert (allocations.live_bytes, allocations.largest_bytes) == (1000, 600)
        del b
        c = torch.zeros(10)
        del a
        assert allocations.live_bytes == 440  # the view holds it
        del view, c
    assert (allocations.live_bytes, allocations.peak_bytes) == (0, 1000)


def test_tensors_that_backward_makes_count_too() -> None:
    x = torch.ones(100, requires_grad=True)
    with Allocations() as allocations:
        (gradient,) = torch.autograd.grad((x * x * 3).sum(), x)
    assert allocations.live_bytes == 400 == gradient.nbytes
    assert allocations.peak_bytes >= 800


def test_errors_of_allocation_are_known_and_others_are_not_taken_for_them() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    for message in (
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'",  # of pinned memory
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
    ):
        assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_logits_of_a_long_batch_never_exist_at_once(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.MAX_CHUNK_ELEMENTS, "cpu", 16 * base.vocab_size)
    engine = TrainingEngine(base, max_tokens_per_microbatch=4096)
    create(engine, "m")
    one = batch(engine, [200] * 4)
    for loss in (one, batch(engine, [200] * 4, forward_only=True)):
        with Allocations() as allocations:
            run(engine, "m", loss)
        elements = one.num_tokens * base.vocab_size
        assert allocations.largest_bytes < 4 * elements * 2 / 3  # that of [T, 2 intermediate] is half of it


def test_pinned_memory_of_deleted_models_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("device"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: given_back.append("host"))
    drop_caches(torch.device("cpu"))
    assert given_back == []
    drop_caches(torch.device("cuda"))
    assert given_back == ["device", "host"]


def test_models_that_wait_in_pinned_memory_may_take_twice_their_size() -> None:
    assert models_bytes(200, 1000, moves=True, ranks_per_machine=2) == 125
    assert models_bytes(200, 1000, moves=False, ranks_per_machine=2) == 100
