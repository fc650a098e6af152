"""A flat buffer on its way through the transports: in buckets, so that packing, hashing and sending overlap.

Both ends cut the buffer at the same places, from the bucket size that the announcement holds. On the wire a value may
have a narrower type than in a buffer; the checksum is that of the bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from tinsmith.weight_channel.transport import Inlet, Outlet


def bucket_slices(numel: int, *, itemsize: int, bucket_bytes: int) -> list[slice]:
    """Elements of each bucket; only the last one may be smaller. `bucket_bytes` 0 is one bucket for all."""
    length = bucket_bytes // itemsize if bucket_bytes else numel
    return [slice(start, min(start + length, numel)) for start in range(0, numel, length)]


def send(outlets: Sequence[Outlet], flat: Tensor, *, dtype: torch.dtype, bucket_bytes: int) -> str:
    """Sends a buffer in host memory as `dtype` through every transport. Returns the checksum.

    While one bucket is sent, the next one is packed and hashed. Blocks; raises RuntimeError when a receiver is lost.
    """
    digest = xxhash.xxh3_128()
    slices = bucket_slices(flat.numel(), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)

    def pack(part: slice) -> Tensor:
        bucket = flat[part].to(dtype)
        digest.update(_bytes(bucket))
        return bucket

    with ThreadPoolExecutor(1) as packer:
        packing = packer.submit(pack, slices[0])
        for n in range(len(slices)):
            bucket = packing.result()
            if n + 1 < len(slices):
                packing = packer.submit(pack, slices[n + 1])
            for outlet in outlets:
                outlet.send(bucket)
    return digest.hexdigest()


def receive(inlet: Inlet, flat: Tensor, *, dtype: torch.dtype, bucket_bytes: int) -> str:
    """The other end: fills `flat`. Returns the checksum of what has arrived.

    While one bucket arrives, the one before it is hashed, and copied where the buffer has another type or lies
    elsewhere. Blocks; raises RuntimeError when the sender is lost.
    """
    digest = xxhash.xxh3_128()
    slices = bucket_slices(flat.numel(), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)
    in_place = flat.dtype == dtype and flat.device.type == inlet.device
    longest = slices[0].stop
    staging = [] if in_place else [torch.empty(longest, dtype=dtype, device=inlet.device) for _ in range(2)]

    def unpack(bucket: Tensor, part: slice) -> None:
        digest.update(_bytes(bucket))
        if not in_place:
            flat[part].copy_(bucket)

    unpacking: Future[None] | None = None
    with ThreadPoolExecutor(1) as unpacker:
        for n, part in enumerate(slices):
            bucket = flat[part] if in_place else staging[n % 2][: part.stop - part.start]
            inlet.receive(bucket)
            if unpacking is not None:
                unpacking.result()  # its staging buffer is the next one
            unpacking = unpacker.submit(unpack, bucket, part)
        if unpacking is not None:
            unpacking.result()
    return digest.hexdigest()


def checksum(flat: Tensor, dtype: torch.dtype) -> str:
    """XXH3-128 of the buffer's bytes as `dtype`, in hexadecimal: what send returns."""
    return xxhash.xxh3_128(_bytes(flat.to(dtype))).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
