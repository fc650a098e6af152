"""Sends a flat buffer through the transports in buckets, so that hashing, sending and copying overlap.

Both ends cut the buffer by the bucket size in the announcement. A value may have a narrower type on the wire than in a
buffer. The checksum is that of the bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from tinsmith.weight_channel.transport import Inlet, Outlet, Wait


def bucket_slices(numel: int, *, itemsize: int, bucket_bytes: int) -> list[slice]:
    """The elements of each bucket. Only the last bucket may be smaller than `bucket_bytes`; 0 makes one bucket."""
    length = bucket_bytes // itemsize if bucket_bytes else numel
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


def send(outlets: Sequence[Outlet], flat: Tensor, *, dtype: torch.dtype, bucket_bytes: int) -> str:
    """Sends a buffer in host memory as `dtype` through every outlet. Returns the checksum of the sent bytes.

    A bucket is hashed while it travels, and the next one is begun before it has arrived. Blocks. Raises RuntimeError if
    a receiver is lost.
    """
    digest = xxhash.xxh3_128()
    last: list[Wait] = []
    for part in bucket_slices(flat.numel(), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes):
        bucket = flat[part].to(dtype)
        begun = [outlet.send(bucket) for outlet in outlets]
        digest.update(_bytes(bucket))
        for wait in last:
            wait()
        last = begun
    for wait in last:
        wait()
    return digest.hexdigest()


def receive(inlet: Inlet, flat: Tensor, *, dtype: torch.dtype, bucket_bytes: int) -> str:
    """Fills `flat` with the buffer that the other end sends. Returns the checksum of the bytes that arrived.

    While one bucket arrives, the one before it is hashed. It is also copied if `flat` has another type or is on another
    device. Blocks. Raises RuntimeError if the sender is lost.
    """
    digest = xxhash.xxh3_128()
    slices = bucket_slices(flat.numel(), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)
    in_place = flat.dtype == dtype and flat.device.type == inlet.device
    staging = [] if in_place else [torch.empty(slices[0].stop, dtype=dtype, device=inlet.device) for _ in range(2)]

    def begin(n: int) -> tuple[Tensor, Wait]:
        part = slices[n]
        bucket = flat[part] if in_place else staging[n % 2][: part.stop - part.start]
        return bucket, inlet.receive(bucket)

    following = begin(0)
    for n, part in enumerate(slices):
        bucket, wait = following
        if n + 1 < len(slices):
            following = begin(n + 1)
        wait()
        digest.update(_bytes(bucket))
        if not in_place:
            flat[part].copy_(bucket)
    return digest.hexdigest()


def checksum(flat: Tensor, dtype: torch.dtype) -> str:
    """XXH3-128 of the buffer's bytes as `dtype`, in hexadecimal, as `send` returns it."""
    return xxhash.xxh3_128(_bytes(flat.to(dtype))).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
