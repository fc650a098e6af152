"""Converts the public API's JSON to protobuf, and protobuf to rows. Pure functions; errors name field and value."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration

from gateway import schemas
from gateway.database.tables.checkpoints import Checkpoint
from gateway.schema_types import TinkerBody
from gateway.shown import shown, shown_given, shown_name
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.pictures.counting import Counting
from tinsmith.pictures.headers import size_of
from tinsmith.rpc import tensors
from tinsmith.rpc.paths import SCHEME
from tinsmith.rpc.times import duration, seconds_of
from tinsmith.rpc.words import value_of, word_of
from tinsmith.v1 import sampler_pb2, trainer_pb2, types_pb2

MIN_TTL_S = 3600
"""Shortest lifetime of a checkpoint, in seconds."""
MAX_TTL_S = 10 * 365 * 86400
"""Longest lifetime of a checkpoint, in seconds."""
_SEED_MASK = 2**63 - 1
_DATA_URL = re.compile(r"data:image/(png|jpeg);base64,")
_INT32 = np.iinfo(np.int32)
INT64 = np.dtype("<i8")
_DTYPES = {
    "int64": (types_pb2.DTYPE_INT64, INT64),
    "float32": (types_pb2.DTYPE_FLOAT32, np.dtype("<f4")),
}
_TENSOR_FIELDS = schemas.TensorData.model_fields.keys()


def fold_seed(seed: int) -> int:
    """Maps any integer to 63 bits, non-negative. Equal seeds stay equal; -1 becomes 2**63 - 1."""
    return seed & _SEED_MASK


def check_int32(value: int, *, field: str) -> int:
    """Returns the value. Raises InvalidRequest when it does not fit into 32 bits."""
    if not _INT32.min <= value <= _INT32.max:
        raise InvalidRequest(f"{field}: {value} does not fit into 32 bits", field=field)
    return value


def optimizer(kind: str) -> types_pb2.Optimizer:
    """The enum value of an optimizer's name. Raises InvalidRequest for an unknown name."""
    try:
        return value_of(types_pb2.Optimizer, kind)
    except ValueError:
        known = ", ".join(word_of(types_pb2.Optimizer, value) for value in types_pb2.Optimizer.values() if value)
        field = "optimizer_config.type"
        raise InvalidRequest(f"{field}: {shown(kind)} is not one of {known}", field=field) from None


def ttl_of(ttl_seconds: int | None) -> Duration | None:
    """A lifetime in seconds as the Duration that the services take. None means that the checkpoint does not expire."""
    return None if ttl_seconds is None else duration(ttl_seconds)


def check_ttl(ttl_seconds: int | None) -> int | None:
    """Returns the lifetime. Raises InvalidRequest when it is shorter than MIN_TTL_S or longer than MAX_TTL_S."""
    if ttl_seconds is not None and not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise InvalidRequest(
            f"ttl_seconds: {ttl_seconds} is outside {MIN_TTL_S} (one hour) .. {MAX_TTL_S} (ten years)",
            field="ttl_seconds",
        )
    return ttl_seconds


def lora_config(config: schemas.LoraConfig, metadata: Mapping[str, str]) -> types_pb2.LoraConfig:
    """The configuration of a new adapter. `metadata`: the run's user_metadata, in which clients ask for adapters on the
    layers for pictures, because the API's lora_config has no flag for them."""
    train_vision = metadata.get("train_vision", "false").lower()
    if train_vision not in ("true", "false"):
        raise InvalidRequest(
            f"user_metadata.train_vision: {metadata['train_vision']!r} is neither 'true' nor 'false'; it says whether "
            "the adapter is on the layers for pictures, too",
            field="user_metadata.train_vision",
        )
    return types_pb2.LoraConfig(
        train_vision=train_vision == "true",
        rank=check_int32(config.rank, field="lora_config.rank"),
        seed=None if config.seed is None else fold_seed(config.seed),
        train_unembed=config.train_unembed,
        train_mlp=config.train_mlp,
        train_attn=config.train_attn,
    )


def optim_step(body: schemas.OptimStep) -> trainer_pb2.OptimStepRequest:
    """The request for the trainer, which checks that the parameters fit the model's optimizer.

    Raises InvalidRequest unless exactly one set of parameters is given.
    """
    request = trainer_pb2.OptimStepRequest(model_id=body.model_id, seq_id=body.seq_id)
    match body.adam_params, body.optimizer_params:
        case None, None:
            raise InvalidRequest("adam_params: is missing", field="adam_params")
        case adam, None:
            request.adam_params.CopyFrom(trainer_pb2.AdamParams(**adam.model_dump()))
        case None, dimuon:
            request.dimuon_params.CopyFrom(trainer_pb2.DimuonParams(**dimuon.model_dump(exclude={"type"})))
        case _:
            raise InvalidRequest(
                "optimizer_params: was sent together with adam_params; an optim_step takes one of them",
                field="optimizer_params",
            )
    return request


# Samples


def int32_bytes(values: Sequence[Any], *, field: str) -> bytes:
    """Token ids as int32, little endian. Raises InvalidRequest, which names the first value that is no token id."""
    with contextlib.suppress(ValueError, OverflowError):
        array = np.array(values)
        are_numbers = bool not in set(map(type, values))  # numpy takes true for 1
        if (
            are_numbers
            and array.ndim == 1
            and array.dtype.kind == "i"
            and _INT32.min <= array.min()
            and array.max() <= _INT32.max
        ):
            return array.astype(np.dtype("<i4")).tobytes()
    for index, value in enumerate(values):
        if type(value) is not int or not _INT32.min <= value <= _INT32.max:
            raise InvalidRequest(f"{field}[{index}]: {shown(value)} is not a token id", field=field)
    return np.array(values, np.dtype("<i4")).tobytes()


def base64_bytes(value: Any, *, field: str) -> bytes:
    """The bytes of a text in base64. Raises InvalidRequest, which names the field."""
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidRequest(f"{field}: {shown(value)} is not base64", field=field) from None


def picture_of(data_url: str, *, field: str) -> tuple[str, bytes] | None:
    """The format and the bytes of a data URL of a PNG or JPEG; None for any other text. Raises InvalidRequest, which
    names the field, when the picture is not in base64."""
    found = _DATA_URL.match(data_url)
    return None if found is None else (found[1], base64_bytes(data_url[found.end() :], field=field))


def type_of(value: dict[str, Any]) -> Any:
    """The type of a chunk in JSON. If the chunk names no type, its other fields tell the type: early SDKs leave out
    fields with their default."""
    if value.get("type") is not None:
        return value["type"]
    kinds = {"tokens": "encoded_text", "location": "image_asset_pointer", "data": "image"}
    return next((kind for key, kind in kinds.items() if value.get(key) is not None), None)


_CHUNK_FIELDS = {
    "encoded_text": {"tokens"},
    "image": {"data", "format", "expected_tokens"},
    "dmel": {"dmel"},
}


def check_fields(value: Mapping[str, Any], known: Collection[str], *, field: str) -> None:
    """Raises InvalidRequest for an unknown field that is set, in an object that has no schema."""
    for name, content in value.items():
        if content is not None and name not in known and name not in TinkerBody.HARMLESS:
            place = f"{field}.{shown_name(name)}" if field else shown_name(name)
            raise InvalidRequest(
                f"{place}: this server knows no such field and cannot apply {shown(content)}; "
                f"known are {', '.join(sorted(known))}",
                field=place,
            )


def chunk(value: dict[str, Any], *, field: str) -> types_pb2.Chunk:
    """One chunk of a prompt. Raises InvalidRequest or Unsupported, which name the field."""
    kind = type_of(value)
    if isinstance(kind, str) and kind in _CHUNK_FIELDS:
        check_fields(value, _CHUNK_FIELDS[kind], field=field)
    match kind:
        case "encoded_text":
            tokens = value.get("tokens")
            if not isinstance(tokens, list):
                raise InvalidRequest(
                    f"{field}.tokens: {shown(tokens)} is not a list of token ids", field=f"{field}.tokens"
                )
            data = int32_bytes(tokens, field=f"{field}.tokens")
            return types_pb2.Chunk(encoded_text=types_pb2.EncodedText(tokens=data))
        case "image":
            expected, data = value.get("expected_tokens"), value.get("data")
            if expected is not None and type(expected) is not int:
                raise InvalidRequest(
                    f"{field}.expected_tokens: {shown(expected)} is not a number of tokens",
                    field=f"{field}.expected_tokens",
                )
            image = types_pb2.Image(
                # A picture that was named by its location is in bytes already (assets.py).
                data=data if isinstance(data, bytes) else base64_bytes(data, field=f"{field}.data"),
                format=str(value.get("format")),
                expected_tokens=expected
                if expected is None
                else check_int32(expected, field=f"{field}.expected_tokens"),
            )
            return types_pb2.Chunk(image=image)
        case "dmel":
            return types_pb2.Chunk(dmel=types_pb2.Dmel(dmel=base64_bytes(value.get("dmel"), field=f"{field}.dmel")))
        case kind:
            raise Unsupported(f"{field}.type: {shown(kind)} is not supported here; use encoded_text")


def num_tokens(chunks: Iterable[types_pb2.Chunk], counting: Counting | None) -> int:
    """Number of tokens of an input: its token ids, the expected tokens of pictures, and `tokens_of_pictures` for
    pictures without an expected number."""
    chunks = list(chunks)
    expected = sum(len(one.encoded_text.tokens) // 4 + max(0, one.image.expected_tokens) for one in chunks)
    return expected + tokens_of_pictures(sizes_of_pictures(chunks), counting)


def sizes_of_pictures(chunks: Iterable[types_pb2.Chunk]) -> list[tuple[int, int]]:
    """Width and height of the pictures that have no expected number of tokens, by their headers. Pictures that will be
    refused are left out. A picture with an expected number has that many tokens, because the service that computes with
    the picture refuses another number."""
    sizes = []
    for one in chunks:
        if one.HasField("image") and not one.image.HasField("expected_tokens"):
            with contextlib.suppress(InvalidRequest):
                sizes.append(size_of(one.image.data, one.image.format, field=""))
    return sizes


def tokens_of_pictures(sizes: Iterable[tuple[int, int]], counting: Counting | None) -> int:
    """Number of tokens of pictures of these sizes. `counting`: the base model's rule; None for a base model that takes
    no pictures, so that the request will be refused."""
    num_tokens = 0
    for size in sizes if counting is not None else ():
        assert counting is not None
        with contextlib.suppress(InvalidRequest):
            num_tokens += counting.tokens(*size, field="")
    return num_tokens


def tensor(value: Mapping[str, Any], *, field: str) -> types_pb2.Tensor:
    """A dense or CSR tensor from its JSON. The service that computes with it checks its shape.

    Raises InvalidRequest.
    """
    check_fields(value, _TENSOR_FIELDS, field=field)
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise InvalidRequest(
            f"{field}.dtype: {shown_given(dtype)} is not one of {', '.join(_DTYPES)}", field=f"{field}.dtype"
        )
    number, kind = _DTYPES[dtype]
    data = _numbers(value.get("data"), kind, field=f"{field}.data")
    shape = value.get("shape")
    sizes = [] if shape is None else _numbers(shape, INT64, field=f"{field}.shape").tolist()
    crow, col = value.get("sparse_crow_indices"), value.get("sparse_col_indices")
    if crow is None and col is None:
        return types_pb2.Tensor(dense=data.tobytes(), dtype=number, shape=sizes)
    if crow is None or col is None:
        raise InvalidRequest(f"{field}: sparse_crow_indices and sparse_col_indices go together", field=field)
    csr = types_pb2.SparseCsr(
        values=data.tobytes(),
        crow_indices=_numbers(crow, INT64, field=f"{field}.sparse_crow_indices").tobytes(),
        col_indices=_numbers(col, INT64, field=f"{field}.sparse_col_indices").tobytes(),
    )
    return types_pb2.Tensor(sparse_csr=csr, dtype=number, shape=sizes)


def _numbers(values: Any, dtype: np.dtype[Any], *, field: str) -> npt.NDArray[Any]:
    """A flat JSON list of numbers as an array. Raises InvalidRequest for any other value, and, if `dtype` is int64, for
    a list with fractions or with integers beyond 64 bits."""
    if not isinstance(values, list):
        raise InvalidRequest(f"{field}: {shown_given(values)} is not a list of numbers", field=field)
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # it holds lists of different lengths
        array = np.empty((), object)
    # numpy makes an array of floats from an empty list, and an array of objects from integers beyond 64 bits.
    if array.ndim != 1 or array.dtype.kind not in ("i" if dtype.kind == "i" and values else "if"):
        wanted = "integers of 64 bits" if dtype.kind == "i" else "numbers"
        raise InvalidRequest(f"{field}: {shown_given(values)} is not a flat list of {wanted}", field=field)
    with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, as in the SDK's conversion
        return array.astype(dtype)


def stop_condition(stop: str | Sequence[str] | Sequence[int] | None) -> sampler_pb2.StopCondition | None:
    """The texts or token ids at which the output stops, besides the model's end-of-sequence tokens. None means that
    only those tokens stop the output, and [] that nothing stops it."""
    if stop is None:
        return None
    if isinstance(stop, str):
        return sampler_pb2.StopCondition(strings=[stop])
    return sampler_pb2.StopCondition(
        strings=[item for item in stop if isinstance(item, str)],
        token_ids=[check_int32(item, field="sampling_params.stop") for item in stop if isinstance(item, int)],
    )


def sampling_params(params: schemas.SamplingParams) -> sampler_pb2.SamplingParams:
    max_tokens = params.max_tokens
    return sampler_pb2.SamplingParams(
        max_tokens=None if max_tokens is None else check_int32(max_tokens, field="sampling_params.max_tokens"),
        seed=None if params.seed is None else fold_seed(params.seed),
        temperature=params.temperature,
        top_k=check_int32(params.top_k, field="sampling_params.top_k"),
        top_p=params.top_p,
        stop=stop_condition(params.stop),
    )


def held_bytes(request: sampler_pb2.SampleRequest) -> int:
    """Memory that a request for a sample takes, in bytes."""
    return request.ByteSize() + tensors.CHUNK_BYTES * len(request.prompt)


def sample_request(body: schemas.Sample, *, version_id: str) -> sampler_pb2.SampleRequest:
    """The request for the sampler, with every field that the client set. The sampler refuses what it cannot do. Raises
    InvalidRequest or Unsupported, which name the field."""
    for field in ("base_model", "model_path"):
        if getattr(body, field) is not None:
            raise Unsupported(f"{field}: a sample names its weights by sampling_session_id only")
    last_n = body.prompt_logprobs_last_n
    target = body.target_prompt_logprobs
    return sampler_pb2.SampleRequest(
        version_id=version_id,
        prompt=[chunk(value, field=f"prompt.chunks[{i}]") for i, value in enumerate(body.prompt.chunks)],
        num_samples=body.num_samples,
        sampling_params=sampling_params(body.sampling_params),
        prompt_logprobs=bool(body.prompt_logprobs),
        prompt_logprobs_last_n=None if last_n is None else check_int32(last_n, field="prompt_logprobs_last_n"),
        target_prompt_logprobs=None
        if target is None
        else tensor(target.model_dump(exclude_none=True), field="target_prompt_logprobs"),
        topk_prompt_logprobs=check_int32(body.topk_prompt_logprobs, field="topk_prompt_logprobs"),
        topk_sample_logprobs=check_int32(body.topk_sample_logprobs, field="topk_sample_logprobs"),
        prompt_alt_tokens_k=check_int32(body.prompt_alt_tokens_k, field="prompt_alt_tokens_k"),
    )


# Checkpoints


def checkpoint_row(info: types_pb2.CheckpointInfo, *, owner: str) -> Checkpoint:
    run_id, kind, _ = info.location.split("/")
    return Checkpoint(
        path=f"{SCHEME}{info.location}",
        location=info.location,
        run_id=run_id,
        kind=kind,
        owner=owner,
        base_model=info.base_model,
        optimizer=word_of(types_pb2.Optimizer, info.optimizer) or "adamw",
        version_id=info.version_id,
        lora_rank=info.lora_config.rank,
        train_unembed=info.lora_config.train_unembed,
        train_mlp=info.lora_config.train_mlp,
        train_attn=info.lora_config.train_attn,
        has_optimizer=info.has_optimizer,
        step=info.step,
        size_bytes=info.size_bytes,
        created_at=seconds_of(info.created_at),
        expires_at=seconds_of(info.created_at) + seconds_of(info.ttl) if info.HasField("ttl") else None,
        user_metadata=dict(info.user_metadata),
    )
