"""Chooses the transport to each sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tinsmith.errors import Unsupported
from tinsmith.weight_channel import ring
from tinsmith.weight_channel.transport import ON_CUDA, Transport

Channel = Literal["auto", "gloo", "nccl", "cuda_ipc", "shm"]
CHANNELS = get_args(Channel)


@dataclass(frozen=True, slots=True)
class SamplerPlace:
    """Where a sampler runs, as was found out by a probe."""

    address: str
    same_machine: bool
    """True when it has connected to a socket that only processes on the trainer's machine, in its network namespace and
    of its user can reach."""
    gpu_uuid: str = ""
    """UUID of its GPU; empty without CUDA."""


def check_channel(channel: Channel, *, gpu_uuid: str) -> None:
    """Raises ValueError for a channel that could never reach any sampler. `gpu_uuid`: the trainer's GPU, or empty."""
    if channel in ("nccl", "cuda_ipc") and not gpu_uuid:
        raise ValueError(f"channel: {channel!r} needs a trainer on CUDA, and this one runs on the CPU")
    if channel in ("shm", "cuda_ipc") and not ring.AVAILABLE:
        raise ValueError(f"channel: {channel!r} needs Linux")


def choose(
    channel: Channel, places: Sequence[SamplerPlace], *, gpu_uuid: str, on_host: Collection[str] = ()
) -> list[Transport]:
    """Chooses one transport for each place. `gpu_uuid`: the trainer's GPU, or empty. `on_host`: addresses for which
    `auto` does not use GPU memory.

    Raises Unsupported when the configured channel cannot reach a sampler.
    """
    neighbours = Counter(place.gpu_uuid for place in places)
    neighbours[gpu_uuid] += 1

    def possible(place: SamplerPlace) -> dict[Transport, str]:
        """All transports, the best first, each with the reason against it; empty when there is none."""
        other_machine = "" if place.same_machine else "it is not on the trainer's machine, or runs as another user"
        no_cuda = "" if gpu_uuid and place.gpu_uuid else "one of the two has no CUDA"
        other_gpu = "" if place.gpu_uuid == gpu_uuid else "it is on another GPU"
        shared_gpu = "" if neighbours[place.gpu_uuid] == 1 else "NCCL takes one process of a GPU, and there are more"
        return {
            "cuda_ipc": other_machine or no_cuda or other_gpu,
            "nccl": no_cuda or shared_gpu,
            "shm": other_machine,
            "gloo": "",
        }

    chosen: list[Transport] = []
    for place in places:
        against = possible(place)
        if channel == "auto":
            fit = [transport for transport, reason in against.items() if not reason]
            if place.address in on_host:
                fit = [transport for transport in fit if transport not in ON_CUDA]
            chosen.append(fit[0])
        elif reason := against[channel]:
            raise Unsupported(f"channel: {channel!r} does not reach the sampler {place.address}: {reason}")
        else:
            chosen.append(channel)
    return chosen
