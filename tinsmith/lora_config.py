"""Translates an adapter's configuration between `LoraConfig`, its form on the wire, and `AdapterConfig`."""

from __future__ import annotations

from tinsmith.errors import InvalidRequest
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.modeling.full_weights import FULL
from tinsmith.v1 import types_pb2 as pb


def config_from_proto(message: pb.LoraConfig, *, max_rank: int) -> AdapterConfig:
    """The configuration of an adapter, or FULL for rank 0. FULL drops the seed: full training draws nothing at random.

    Raises InvalidRequest for a rank above `max_rank`, for an adapter that would train nothing, and for rank 0 with a
    train_* flag that is false, or with train_vision.
    """
    if message.rank == 0:
        for flag in ("train_attn", "train_mlp", "train_unembed"):
            if not getattr(message, flag):
                raise InvalidRequest(
                    f"lora_config.{flag}: false is not possible with rank 0, which trains every parameter; set it to "
                    "true, or choose a rank",
                    field=f"lora_config.{flag}",
                )
        if message.train_vision:
            raise InvalidRequest(
                "lora_config.train_vision: is not possible with rank 0, because pictures are not supported when all "
                "parameters are trained; choose a rank",
                field="lora_config.train_vision",
            )
        return FULL
    if not 1 <= message.rank <= max_rank:
        raise InvalidRequest(
            f"lora_config.rank: {message.rank} is outside 1..{max_rank}, this server's max_lora_rank",
            field="lora_config.rank",
        )
    if not (message.train_attn or message.train_mlp or message.train_unembed):
        raise InvalidRequest(
            "lora_config: at least one of train_attn, train_mlp and train_unembed must be true", field="lora_config"
        )
    return AdapterConfig(
        rank=message.rank,
        train_attn=message.train_attn,
        train_mlp=message.train_mlp,
        train_unembed=message.train_unembed,
        seed=message.seed if message.HasField("seed") else None,
        train_vision=message.train_vision,
    )


def config_to_proto(config: AdapterConfig) -> pb.LoraConfig:
    """The message for a configuration: the inverse of `config_from_proto`, except for a seed that FULL has dropped."""
    return pb.LoraConfig(
        rank=config.rank,
        seed=config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        train_vision=config.train_vision,
    )
