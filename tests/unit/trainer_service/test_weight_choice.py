"""Which transport a sampler gets."""

import re

import pytest

from tinsmith.errors import Unsupported
from tinsmith.weight_channel import ring
from trainer_service.weight_sync.choice import CHANNELS, Channel, SamplerPlace, check_channel, choose

HERE = SamplerPlace("here", same_machine=True)
AWAY = SamplerPlace("away", same_machine=False)
SAME_GPU = SamplerPlace("same gpu", same_machine=True, gpu_uuid="0")
NEXT_GPU = SamplerPlace("next gpu", same_machine=True, gpu_uuid="1")
FAR_GPU = SamplerPlace("far gpu", same_machine=False, gpu_uuid="2")


@pytest.mark.parametrize(
    ("gpu_uuid", "places", "chosen"),
    [
        ("", [HERE, AWAY], ["shm", "gloo"]),
        ("", [SAME_GPU, FAR_GPU], ["shm", "gloo"]),
        ("0", [SAME_GPU, NEXT_GPU, FAR_GPU, HERE, AWAY], ["cuda_ipc", "nccl", "nccl", "shm", "gloo"]),
        ("0", [NEXT_GPU, NEXT_GPU, FAR_GPU], ["shm", "shm", "nccl"]),
        ("0", [FAR_GPU, FAR_GPU], ["gloo", "gloo"]),
        ("0", [SamplerPlace("another container on the GPU", same_machine=False, gpu_uuid="0")], ["gloo"]),
        ("0", [], []),
    ],
)
def test_auto_takes_the_best_that_reaches_each(gpu_uuid: str, places: list[SamplerPlace], chosen: list[str]) -> None:
    assert choose("auto", places, gpu_uuid=gpu_uuid) == chosen


def test_auto_keeps_off_gpu_memory_for_those_that_are_named() -> None:
    places = [SAME_GPU, NEXT_GPU, FAR_GPU]
    chosen = choose("auto", places, gpu_uuid="0", on_host=["same gpu", "far gpu"])
    assert chosen == ["shm", "nccl", "gloo"]


@pytest.mark.parametrize(
    ("channel", "place", "reason"),
    [
        ("shm", AWAY, "it is not on the trainer's machine"),
        ("cuda_ipc", HERE, "one of the two has no CUDA"),
        ("cuda_ipc", NEXT_GPU, "it is on another GPU"),
        ("nccl", AWAY, "one of the two has no CUDA"),
        ("nccl", SAME_GPU, "NCCL takes one process of a GPU"),
    ],
)
def test_a_chosen_channel_that_does_not_reach_a_sampler_is_refused_by_name(
    channel: Channel, place: SamplerPlace, reason: str
) -> None:
    with pytest.raises(
        Unsupported, match=re.escape(f"channel: '{channel}' does not reach the sampler {place.address}")
    ) as e:
        choose(channel, [place], gpu_uuid="0")
    assert reason in str(e.value)
    assert choose("gloo", [place], gpu_uuid="0") == ["gloo"]


def test_a_channel_that_this_trainer_cannot_have_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for channel in CHANNELS:
        check_channel(channel, gpu_uuid="0")
    for channel in ("nccl", "cuda_ipc"):
        with pytest.raises(ValueError, match=f"channel: '{channel}' needs a trainer on CUDA"):
            check_channel(channel, gpu_uuid="")
    monkeypatch.setattr(ring, "AVAILABLE", False)
    with pytest.raises(ValueError, match="channel: 'shm' needs Linux"):
        check_channel("shm", gpu_uuid="")
    check_channel("auto", gpu_uuid="")
