"""Requests of training as the engine's types, validated, and the engine's results as answers: the only code that
converts them from and to protobuf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from tinsmith.errors import InvalidRequest, UnknownLossFn
from tinsmith.model_input import model_input
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.rpc import tensors
from tinsmith.rpc.server import MAX_MESSAGE_BYTES
from tinsmith.v1 import trainer_pb2, types_pb2
from trainer_service.engine.batch import CUSTOM, FITS_MEMORY, LOSS_FN_NAMES, Batch, BatchLimits, Datum, Floats, Output
from trainer_service.engine.optimizers import LARGEST, AdamParams, DimuonParams, Params
from trainer_service.engine.pack import num_shared
from trainer_service.objectives.custom_loss import MAX_BYTES, MAX_NODE_BYTES, CustomLoss, Input, build_loss
from trainer_service.objectives.losses import LOSS_FNS, Loss
from trainer_service.request_bytes import batch_bytes

_TYPE = "TorchLossReturn"
_ANSWER_BYTES = MAX_MESSAGE_BYTES - 1024 * 1024
"""Limit on the logprobs of one answer, in bytes. The rest of an answer is far below the 1 MiB left for it."""

_NOT_NEGATIVE = (0.0, LARGEST)
_DECAY = (0.0, 1.0)
_ANY = (-LARGEST, LARGEST)
_ABOVE_ZERO = (1.2e-38, LARGEST)
"""A smaller eps is 0 in float32. AdamW would then compute 0 / 0 for parameters that have had no gradient yet, such as
every A at the first step."""
_ADAM_RANGES = {
    "learning_rate": _NOT_NEGATIVE,
    "beta1": _DECAY,
    "beta2": _DECAY,
    "eps": _ABOVE_ZERO,
    "weight_decay": _NOT_NEGATIVE,
    "grad_clip_norm": _ANY,
}
_DIMUON_RANGES = {"learning_rate": _NOT_NEGATIVE, "beta1": _DECAY, "grad_clip_norm": _ANY}
_ADAM_DEFAULTS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""The SDK's defaults. docs/grpc.md repeats them."""
_DIMUON_DEFAULTS = {"beta1": 0.9, "grad_clip_norm": 0.0}


def batch_of(
    request: trainer_pb2.ForwardBackwardRequest,
    limits: BatchLimits,
    *,
    held_bytes: int | None = None,
    max_bytes: int | None = None,
    check_loss: bool = True,
) -> Batch:
    """Makes and validates the batch of a request. Raises InvalidRequest or UnknownLossFn, which name the field and
    the value.

    `held_bytes`: `batch_bytes(request)`, if it has been computed already. `max_bytes`: limit on `held_bytes`.
    `check_loss`: a custom loss is checked for every datum (see `Batch.with_loss_checked`). When it is false, only the
    largest datum is checked, and its expected time counts for all.
    """
    if request.loss_fn not in LOSS_FN_NAMES:
        raise UnknownLossFn(
            f"loss_fn: {request.loss_fn!r} is not one of {', '.join(LOSS_FN_NAMES)}",
            field="loss_fn",
            loss_fn=request.loss_fn,
        )
    if not 1 <= len(request.data) <= limits.max_datums:
        raise InvalidRequest(f"data: {len(request.data)} datums are outside 1..{limits.max_datums}", field="data")
    _check_targets(request, limits)
    if held_bytes is None:
        held_bytes = batch_bytes(request, limits.counting)
    if max_bytes is not None and held_bytes > max_bytes:
        raise InvalidRequest(
            f"data: the batch and its answer take {held_bytes} bytes of memory, and this server allows {max_bytes} "
            "for one request (half of its max_queued_bytes); send fewer or shorter datums",
            field="data",
        )
    loss, config, datums = (_custom if request.loss_fn == CUSTOM else _built_in)(request, limits)
    batch = Batch(
        loss_fn=request.loss_fn,
        loss=loss,
        loss_config=config,
        forward_only=request.forward_only,
        datums=datums,
        held_bytes=held_bytes,
        request=request,
        model_id=request.model_id,
        seq_id=request.seq_id,
        shared=num_shared(datums) if limits.share_prefixes else (),
    )
    if not isinstance(loss, CustomLoss):
        return batch
    if check_loss:
        return batch.with_loss_checked()
    largest = max(datums, key=lambda datum: datum.charge)
    (loss_s,) = loss.check_shapes([(largest.targets.shape, largest.inputs)])
    return replace(batch, datums=[replace(datum, loss_s=loss_s) for datum in datums])


def batch_to_bytes(batch: Batch) -> bytes:
    """The request of a batch, from which another rank makes the batch (batch_from_bytes)."""
    assert batch.request is not None
    return batch.request.SerializeToString()


def batch_from_bytes(request: bytes, limits: BatchLimits) -> Batch:
    """The batch of a serialized request that this server has accepted, so its custom loss was checked before."""
    return batch_of(trainer_pb2.ForwardBackwardRequest.FromString(request), limits, check_loss=False)


def _built_in(
    request: trainer_pb2.ForwardBackwardRequest, limits: BatchLimits
) -> tuple[Loss, Mapping[str, float], list[Datum]]:
    """The loss, its settings and the datums of a batch with one of LOSS_FNS."""
    if request.HasField("custom_loss"):
        raise InvalidRequest(
            f"custom_loss: goes with loss_fn {CUSTOM!r} only, not with {request.loss_fn!r}", field="custom_loss"
        )
    loss = LOSS_FNS[request.loss_fn]
    config = _config(request, loss)
    datums = [
        _datum(datum, request.loss_fn, loss, config, limits, field=f"data[{index}]")
        for index, datum in enumerate(request.data)
    ]
    _check_values(datums, loss.arrays, limits)
    if loss.check is not None:
        for index, datum in enumerate(datums):
            loss.check(datum.inputs, f"data[{index}].loss_fn_inputs")
    return loss, config, datums


def _custom(
    request: trainer_pb2.ForwardBackwardRequest, limits: BatchLimits
) -> tuple[CustomLoss, Mapping[str, float], list[Datum]]:
    """The loss, its settings, which are none, and the datums of a batch with a custom loss."""
    if not request.HasField("custom_loss"):
        raise InvalidRequest(f"custom_loss: missing; loss_fn {CUSTOM!r} needs it", field="custom_loss")
    settings = [*request.loss_fn_config, *request.loss_fn_config_v2]
    if settings:
        where = _setting(request, settings[0])
        raise InvalidRequest(f"{where}: a custom loss takes no settings; custom_loss holds all of it", field=where)
    loss = loss_of(request.custom_loss)
    _check_sparse_inputs(request)
    datums = [_custom_datum(one, loss, limits, field=f"data[{index}]") for index, one in enumerate(request.data)]
    _check_values(datums, (), limits)
    return loss, {}, datums


def loss_of(loss: trainer_pb2.CustomLoss) -> CustomLoss:
    """The custom loss of a request. Raises InvalidRequest for errors that can be found without data."""
    return build_loss(loss.name[:100], tuple(Input(one.name, one.rank) for one in loss.inputs), loss.graph)


def _check_targets(request: trainer_pb2.ForwardBackwardRequest, limits: BatchLimits) -> None:
    """Refuses too many targets for one token, or for one answer. Reads shapes only and makes no array."""
    num_targets = 0
    for index, datum in enumerate(request.data):
        if "target_tokens" not in datum.loss_fn_inputs:
            continue
        targets = datum.loss_fn_inputs["target_tokens"]
        if len(targets.shape) == 2 and targets.shape[1] > limits.max_targets_per_token:
            where = f"data[{index}].loss_fn_inputs.target_tokens"
            raise InvalidRequest(
                f"{where}: {targets.shape[1]} targets for a token are above this server's max_targets_per_token "
                f"{limits.max_targets_per_token}",
                field=where,
            )
        num_targets += tensors.num_elements(targets)
    num_bytes = num_targets * np.dtype(np.float32).itemsize
    if num_bytes > _ANSWER_BYTES:
        raise InvalidRequest(
            f"data: the logprobs of all {num_targets} targets are {num_bytes} bytes in its answer, and a message has "
            f"at most {MAX_MESSAGE_BYTES}; send fewer datums or targets at once",
            field="data",
        )


def _check_sparse_inputs(request: trainer_pb2.ForwardBackwardRequest) -> None:
    """Refuses sparse inputs of a custom loss that would be too large as dense arrays, before they are made dense."""
    total = 0
    for index, datum in enumerate(request.data):
        for name, tensor in datum.loss_fn_inputs.items():
            if name == "target_tokens" or tensor.WhichOneof("layout") != "sparse_csr":
                continue
            num_bytes = tensors.num_bytes(tensor)
            total += num_bytes
            for what, used, limit in (
                ("dense", num_bytes, MAX_NODE_BYTES),
                ("dense, in all datums,", total, MAX_BYTES),
            ):
                if used > limit:
                    where = f"data[{index}].loss_fn_inputs.{name}"
                    raise InvalidRequest(
                        f"{where}: sparse inputs of a custom loss are {used} bytes when they are {what} this server "
                        f"allows {limit}",
                        field=where,
                    )


def _config(request: trainer_pb2.ForwardBackwardRequest, loss: Loss) -> Mapping[str, float]:
    given: dict[str, float] = dict(request.loss_fn_config)
    if request.loss_fn_config_v2:
        given = {}
        for key, value in request.loss_fn_config_v2.items():
            if value.WhichOneof("value") != "number":
                where = _setting(request, key)
                raise InvalidRequest(f"{where}: {value.text!r} is not a number", field=where)
            given[key] = value.number
    for key, number in given.items():
        where = _setting(request, key)
        if key not in loss.config:
            known = ", ".join(loss.config) or "no settings"
            raise InvalidRequest(f"{where}: {request.loss_fn} takes {known}", field=where, key=key)
        if not math.isfinite(number):
            raise InvalidRequest(f"{where}: {number} is not finite", field=where, key=key)
    config = {**loss.config, **given}
    if loss.check_config is not None:
        loss.check_config(config, "loss_fn_config" if request.loss_fn_config else "loss_fn_config_v2")
    return config


def _setting(request: trainer_pb2.ForwardBackwardRequest, key: str) -> str:
    """Path of a setting of the loss. The SDK sends each number in both fields, and its users know the first one."""
    return f"loss_fn_config.{key}" if key in request.loss_fn_config else f"loss_fn_config_v2.{key}"


def _datum(
    datum: types_pb2.Datum, loss_fn: str, loss: Loss, config: Mapping[str, float], limits: BatchLimits, *, field: str
) -> Datum:
    tokens, pictures = _tokens(datum, limits, field=field)
    unknown = set(datum.loss_fn_inputs) - {"target_tokens", *loss.arrays}
    if unknown:
        name = min(unknown)
        where = f"{field}.loss_fn_inputs.{name}"
        raise InvalidRequest(f"{where}: {loss_fn} takes target_tokens, {', '.join(loss.arrays)}", field=where)
    targets = _targets(datum, tokens.size, loss_fn, tuple(range(1, loss.max_dims + 1)), limits, field=field)
    inputs: dict[str, Floats] = {}
    for name in loss.arrays:
        if name in datum.loss_fn_inputs or name in loss.required:
            inputs[name] = _floats(datum, name, targets, field=field)
        elif name == "weights" and datum.loss_fn_inputs["target_tokens"].WhichOneof("layout") == "sparse_csr":
            # An absent cell reads as token 0, and so does a real target of token 0. Default weights of 1 would train
            # both, so the weights must say which cells count.
            where = f"{field}.loss_fn_inputs.weights"
            raise InvalidRequest(f"{where}: missing; sparse target_tokens do not say which cells count", field=where)
        else:
            inputs[name] = np.full(targets.shape, config.get(name, 1.0), np.float32)
            if name == "weights":
                _ignore_pictures(inputs[name], pictures)
    return _fitting(Datum(tokens, targets, inputs, pictures), limits, field=field)


def _custom_datum(datum: types_pb2.Datum, loss: CustomLoss, limits: BatchLimits, *, field: str) -> Datum:
    """Makes a datum for a custom loss. Its inputs keep their dtype and may have any shape of the declared rank.

    Inputs that the loss does not declare are ignored.
    """
    tokens, pictures = _tokens(datum, limits, field=field)
    logprobs, *others = loss.inputs
    targets = _targets(datum, tokens.size, f"loss {loss.name!r}", (logprobs.rank,), limits, field=field)
    inputs: dict[str, npt.NDArray[Any]] = {}
    for declared in others:
        where = f"{field}.loss_fn_inputs.{declared.name}"
        if declared.name not in datum.loss_fn_inputs:
            raise InvalidRequest(f"{where}: missing; loss {loss.name!r} reads it", field=where)
        tensor = datum.loss_fn_inputs[declared.name]
        values = tensors.to_numpy(tensor, field=where)
        if declared.rank == 0 and values.size == 1 and not tensor.shape:  # on the wire a scalar has no shape
            values = values.reshape(())
        if values.ndim != declared.rank:
            raise InvalidRequest(
                f"{where}: shape {list(values.shape)} has {values.ndim} dimensions, "
                f"but loss {loss.name!r} declares rank {declared.rank}",
                field=where,
            )
        inputs[declared.name] = values
    return _fitting(Datum(tokens, targets, inputs, pictures), limits, field=field)


def _tokens(
    datum: types_pb2.Datum, limits: BatchLimits, *, field: str
) -> tuple[npt.NDArray[np.int32], tuple[PlacedPicture, ...]]:
    """The token ids of the input, and its pictures."""
    tokens, pictures = model_input(
        datum.model_input,
        processor=limits.processor,
        why_no_pictures=limits.why_no_pictures,
        max_tokens=limits.max_context_length,
        field=f"{field}.model_input",
    )
    if not 1 <= tokens.size <= limits.max_context_length:
        raise InvalidRequest(
            f"{field}.model_input: {tokens.size} tokens are outside 1..{limits.max_context_length}, "
            f"{limits.context_reason}",
            field=f"{field}.model_input",
        )
    return tokens, pictures


def _ignore_pictures(weights: Floats, pictures: Sequence[PlacedPicture]) -> None:
    """Sets the weights to 0 where the target is a token of a picture, which nobody can predict. Position i has the
    target i + 1."""
    for one in pictures:
        weights[max(0, one.start - 1) : one.start + one.picture.num_tokens - 1] = 0.0


def _targets(
    datum: types_pb2.Datum, num_tokens: int, reader: str, ranks: tuple[int, ...], limits: BatchLimits, *, field: str
) -> npt.NDArray[np.int64]:
    where = f"{field}.loss_fn_inputs.target_tokens"
    if "target_tokens" not in datum.loss_fn_inputs:
        raise InvalidRequest(f"{where}: missing; {reader} needs it", field=where)
    targets = tensors.to_numpy(datum.loss_fn_inputs["target_tokens"], field=where)
    if targets.dtype.kind != "i":
        raise InvalidRequest(f"{where}: dtype {targets.dtype} must be int64", field=where)
    if targets.ndim not in ranks or targets.shape[0] != num_tokens or 0 in targets.shape:
        shapes = " or ".join(f"[{num_tokens}{', K' * (rank - 1)}]" for rank in ranks)
        raise InvalidRequest(
            f"{where}: shape {list(targets.shape)} must be {shapes}, one row for each token of the model input",
            field=where,
        )
    return targets.astype(np.int64, copy=False)


def _fitting(datum: Datum, limits: BatchLimits, *, field: str) -> Datum:
    """Returns the datum, or raises InvalidRequest when its arrays are too large for memory."""
    if limits.longest_datum is not None and datum.charge > limits.longest_datum:
        where = f"{field}.loss_fn_inputs.target_tokens"
        raise InvalidRequest(
            f"{where}: the datum's arrays, with targets of shape {list(datum.targets.shape)}, count as {datum.charge} "
            f"tokens, which is above {limits.longest_datum}, {FITS_MEMORY}",
            field=where,
        )
    return datum


def _floats(datum: types_pb2.Datum, name: str, targets: npt.NDArray[np.int64], *, field: str) -> Floats:
    where = f"{field}.loss_fn_inputs.{name}"
    if name not in datum.loss_fn_inputs:
        raise InvalidRequest(f"{where}: missing", field=where)

    def check(shape: tuple[int, ...]) -> None:
        if shape != targets.shape:
            raise InvalidRequest(
                f"{where}: shape {list(shape)} is not that of target_tokens, {list(targets.shape)}", field=where
            )

    sent = datum.loss_fn_inputs[name]
    if sent.WhichOneof("layout") == "sparse_csr":  # small as sent, but possibly huge as a dense array
        check(tuple(sent.shape))
    values = tensors.to_numpy(sent, field=where)
    check(values.shape)
    return values.astype(np.float32, copy=False)


def _check_values(datums: Sequence[Datum], finite: Sequence[str], limits: BatchLimits) -> None:
    """Refuses token ids that do not exist, and numbers in the inputs named `finite` that are not finite.

    The arrays of all datums are checked at once: thousands of small ones would take ten times as long each on its own.
    """
    size = limits.vocab_size
    if (
        tensors.are_tokens(_joined([datum.tokens_N for datum in datums]), size)
        and tensors.are_tokens(_joined([datum.targets for datum in datums]), size)
        and all(np.isfinite(_joined([datum.inputs[name] for datum in datums])).all() for name in finite)
    ):
        return
    for index, datum in enumerate(datums):
        tensors.check_tokens(datum.tokens_N, size, field=f"data[{index}].model_input")
        tensors.check_tokens(datum.targets, size, field=f"data[{index}].loss_fn_inputs.target_tokens")
        for name in finite:
            values = datum.inputs[name]
            if not np.isfinite(values).all():
                where = f"data[{index}].loss_fn_inputs.{name}"
                position = [int(i) for i in np.argwhere(~np.isfinite(values))[0]]
                raise InvalidRequest(f"{where}{position}: {values[tuple(position)]} is not finite", field=where)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([array.ravel() for array in arrays])


def params_of(request: trainer_pb2.OptimStepRequest) -> Params:
    """The settings of a step. Raises InvalidRequest when they are missing or out of range."""
    match request.WhichOneof("params"):
        case "adam_params":
            return AdamParams(**_checked(request.adam_params, _ADAM_RANGES, _ADAM_DEFAULTS, field=AdamParams.field))
        case "dimuon_params":
            params = _checked(request.dimuon_params, _DIMUON_RANGES, _DIMUON_DEFAULTS, field=DimuonParams.field)
            return DimuonParams(**params)
        case _:
            raise InvalidRequest(
                "params: missing; a model with optimizer 'adamw' needs adam_params, one with 'dimuon' dimuon_params",
                field="params",
            )


def _checked(
    params: trainer_pb2.AdamParams | trainer_pb2.DimuonParams,
    ranges: Mapping[str, tuple[float, float]],
    defaults: Mapping[str, float],
    *,
    field: str,
) -> dict[str, float]:
    """The fields in `ranges`, absent ones with their default.

    Raises InvalidRequest for a field that is out of its range, or that is absent and has no default.
    """
    given = {descriptor.name: value for descriptor, value in params.ListFields()}
    values: dict[str, float] = {}
    for name, (low, high) in ranges.items():
        if name not in given and name not in defaults:
            raise InvalidRequest(f"{field}.{name}: is missing", field=f"{field}.{name}")
        values[name] = value = given.get(name, defaults.get(name, 0.0))
        if not (math.isfinite(value) and low <= value < high):
            raise InvalidRequest(f"{field}.{name}: {value} is outside [{low}, {high})", field=f"{field}.{name}")
    return values


def answer_of(output: Output) -> trainer_pb2.ForwardBackwardResponse:
    """Makes the response. Neighbouring datums with the same trailing shape share one record."""
    runs = [list(group) for _, group in groupby(output.logprobs, key=_trailing_shape)]
    return trainer_pb2.ForwardBackwardResponse(
        loss_fn_output_type=_TYPE,
        loss_fn_outputs=[
            types_pb2.ArrayRecord(type_tag=_TYPE, fields={"logprobs": tensors.batched(run)}, num_datums=len(run))
            for run in runs
        ],
        metrics=output.metrics,
    )


def _trailing_shape(array: npt.NDArray[Any]) -> tuple[int, ...]:
    return array.shape[1:]
