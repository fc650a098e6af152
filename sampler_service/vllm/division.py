"""Division of a model by tensor_parallel: the devices, and the part of the model and of the cache on each."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from transformers import PretrainedConfig

from sampler_service.config import SamplerConfig
from sampler_service.core.sizing import Sizes, free_bytes_of, kv_bytes_per_token, measured_cache
from tinsmith.modeling.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of the workers, before anything is loaded."""

    type: str
    """ "cpu" or "cuda"."""
    count: int
    free_bytes: int
    """Free memory of the fullest device, in bytes. On a CPU, each worker's share of the machine's memory."""

    @classmethod
    def of(cls, device_type: str, count: int) -> Devices:
        """Raises ValueError when there are fewer GPUs."""
        if device_type != "cuda":
            return cls(device_type, count, free_bytes_of(torch.device(device_type)) // count)
        visible = torch.cuda.device_count()
        if visible < count:
            raise ValueError(
                f"tensor_parallel: {count} needs as many GPUs, and {visible} can be seen; look at CUDA_VISIBLE_DEVICES"
            )
        return cls(device_type, count, min(torch.cuda.mem_get_info(index)[0] for index in range(count)))


def check_division(model: PretrainedConfig, size: int) -> None:
    """Checks that the workers can divide the attention by whole heads. If there are fewer key and value heads than
    workers, several workers have the same head. Raises ValueError."""
    text = model.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None)
    recurrent = [getattr(text, name, 0) for name in ("linear_num_key_heads", "linear_num_value_heads")]

    def divides(count: int) -> bool:
        return (
            (heads is None or not heads % count)
            and (kv_heads is None or not kv_heads % count or not count % kv_heads)
            and not any(one % count for one in recurrent)
        )

    if not divides(size):
        largest = max(count for count in range(1, size) if divides(count))
        linear = ", linear_num_key_heads {}, linear_num_value_heads {}".format(*recurrent) if any(recurrent) else ""
        raise ValueError(
            f"tensor_parallel: {size} does not divide the attention of this model (num_attention_heads {heads}, "
            f"num_key_value_heads {kv_heads}{linear}); {largest} does"
        )


def sizes_of_each(
    base: BaseModel, config: SamplerConfig, devices: Devices, *, for_pictures: int = 0, bytes_per_lane: int = 0
) -> Sizes:
    """Sizes for one worker. `for_pictures`: bytes that the vision tower needs in each worker. `bytes_per_lane`: bytes
    of a running sequence in each worker, beside its tokens. Raises ValueError when a worker has no room for its part of
    the weights."""
    weights = sum(parameter.nbytes for parameter in base.parameters.values()) // devices.count
    if weights >= devices.free_bytes:
        raise ValueError(
            f"tensor_parallel: {devices.count} workers have {weights} bytes of weights each, and "
            f"{devices.free_bytes} bytes are free for one; take more of them"
        )
    return Sizes.within(
        max((devices.free_bytes - weights) // 2, devices.free_bytes - weights - for_pictures),
        base,
        config,
        bytes_per_token=-(-kv_bytes_per_token(measured_cache(base)) * kv_part(base.config, devices.count) // 1),
        bytes_per_lane=bytes_per_lane,
        device_type=devices.type,
    )


def kv_part(model: PretrainedConfig, size: int) -> Fraction:
    """The share of a token's keys and values that each worker keeps."""
    heads = getattr(model, "num_key_value_heads", None)
    if heads is None or hasattr(model, "kv_lora_rank"):  # one latent vector for all heads
        return Fraction(1)
    return Fraction(max(1, heads // size), heads)
