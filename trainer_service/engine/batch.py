"""A forward_backward from its request to its results, and the only code that converts it from and to protobuf.

`Batch.from_proto` validates a request. The batch then collects its results, while its datums run in micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tinsmith.errors import InvalidRequest, ServiceError, UnknownLossFn
from tinsmith.rpc import tensors
from tinsmith.rpc.server import MAX_MESSAGE_BYTES
from tinsmith.v1 import trainer_pb2, types_pb2
from trainer_service.objectives.custom_loss import MAX_BYTES, MAX_NODE_BYTES, CustomLoss
from trainer_service.objectives.losses import LOSS_FNS, Arrays, Loss, Objective, Term
from trainer_service.objectives.mismatch import Mismatch

Floats = npt.NDArray[np.float32]

CUSTOM = "custom"
LOSS_FN_NAMES = (*LOSS_FNS, CUSTOM)

MAX_TARGETS_PER_TOKEN = 1024
"""Default of the setting max_targets_per_token."""

_TYPE = "TorchLossReturn"
_ANSWER_BYTES = MAX_MESSAGE_BYTES - 1024 * 1024
"""Limit on the logprobs of one answer, in bytes. The rest of an answer is far below the 1 MiB left for it."""
_DATUM_BYTES = 1024
"""Memory of a datum's Python objects, without its arrays, in bytes."""
_TARGET_BYTES = 28
"""Memory of one target, in bytes: the target (8), up to three float32 inputs that the loss fills in (12), and its
logprob (4), of which there are two copies while the answer is made (8)."""
_FITS_MEMORY = "what fits into this trainer's memory"
_ELEMENTS_PER_TOKEN = 128
"""This many elements of targets and inputs are charged as one more token. A target with its weight takes about 115
bytes between request and answer, so this many elements take 7 kB; a token of the smallest models takes 14 kB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest batch and datum that a request may bring."""

    vocab_size: int
    max_context_length: int
    max_datums: int = 4096
    context_reason: str = "this model's context length"
    """Where max_context_length comes from, in the words of an error message."""
    max_targets_per_token: int = MAX_TARGETS_PER_TOKEN
    longest_datum: int | None = None
    """Largest charge of one datum that fits into memory, in tokens; None means no limit."""

    def bounded(self, longest_datum: int | None) -> Limits:
        """These limits, lowered to the longest datum that fits into memory (in tokens; None means no limit)."""
        if longest_datum is None or longest_datum >= self.max_context_length:
            return replace(self, longest_datum=longest_datum)
        return replace(self, max_context_length=longest_datum, context_reason=_FITS_MEMORY, longest_datum=longest_datum)


@dataclass(frozen=True, slots=True)
class Datum:
    """One example: N tokens, each with one target or with K targets."""

    tokens_N: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int64]
    """[N] or [N, K]."""
    inputs: Arrays
    """The other arrays that the loss reads, by name. For a built-in loss each has the targets' shape."""
    loss_s: float = 0.0
    """Expected time of the custom loss, in seconds. 0 for built-in losses: their time is part of a token's cost."""

    @property
    def length(self) -> int:
        return self.tokens_N.size

    @property
    def charge(self) -> int:
        """Tokens that the datum counts for in turns, micro-batches and memory: its length, more for many targets."""
        return charge_of(self.length, [self.targets.size, *(values.size for values in self.inputs.values())])


def charge_of(num_tokens: int, sizes: Iterable[int]) -> int:
    """Charge of a datum of `num_tokens` tokens. `sizes`: number of elements of each of its other arrays.

    An array with one element for each token adds nothing.
    """
    more = sum(max(0, size - num_tokens) for size in sizes)
    return num_tokens + math.ceil(more / _ELEMENTS_PER_TOKEN)


@dataclass(slots=True, eq=False)
class Batch:
    """One forward_backward: its data, and its results so far.

    Datums may run in any order, together with those of other batches; the results are complete after all. A copy made
    by `dataclasses.replace` has no results.
    """

    loss_fn: str
    loss: Objective
    loss_config: Mapping[str, float]
    """The loss's settings, with defaults filled in."""
    forward_only: bool
    datums: Sequence[Datum]
    held_bytes: int = 0
    """Memory that the batch takes until it is answered, in bytes."""
    request: trainer_pb2.ForwardBackwardRequest | None = field(default=None, repr=False)
    """The message that the batch was made from; other ranks make the batch from it too. Most arrays are views of its
    bytes."""
    model_id: str = ""
    seq_id: int = 0
    """The request's seq_id; 0 for a batch that was not made from a request."""
    alone: bool = False
    """True when the batch's micro-batches may have no datums of another batch."""
    charges: list[int] = field(init=False, repr=False)
    """Charge of each datum, in tokens."""
    costs: list[int] = field(init=False, repr=False)
    """Tokens that each datum counts for in its model's turns: its charge, and more for the time of a custom loss."""
    num_taken: int = field(default=0, init=False)
    """Number of datums that have been taken into micro-batches."""
    num_waiting_tokens: int = field(init=False)
    """Costs of the datums that have not been taken."""
    logprobs: list[Floats] = field(init=False, repr=False)
    """For each datum that has run its logprobs, with the shape of its targets; empty arrays for the others."""
    loss_sum: float = field(default=0.0, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """The loss function's own metrics, as sums over the datums that have run."""
    mismatch: Mismatch | None = field(default=None, init=False)
    """Gap between trainer and sampler on the datums that have run; None when no sampling logprobs were given."""
    error: ServiceError | None = field(default=None, init=False)
    """Why the batch failed. Its datums that have not run yet are skipped."""
    loss_seconds: float = field(default=0.0, init=False)
    """Time of the custom loss that its model has not been charged for yet, in seconds. 0 for built-in losses: their
    time is part of a token's cost."""

    def __post_init__(self) -> None:
        self.charges = [datum.charge for datum in self.datums]
        self.set_costs(self.charges)
        self.logprobs = [np.empty(0, np.float32)] * len(self.datums)

    def set_costs(self, costs: list[int]) -> None:
        """Sets the costs of all datums, before the first is taken."""
        self.costs = costs
        self.num_waiting_tokens = sum(costs)

    def take(self) -> int:
        """Takes the next datum into a micro-batch. Returns its cost."""
        cost = self.costs[self.num_taken]
        self.num_taken += 1
        self.num_waiting_tokens -= cost
        return cost

    @property
    def num_waiting(self) -> int:
        """Number of datums that have not been taken into micro-batches."""
        return len(self.datums) - self.num_taken

    @property
    def num_tokens(self) -> int:
        return sum(datum.length for datum in self.datums)

    @staticmethod
    def bytes_of(request: trainer_pb2.ForwardBackwardRequest, message_bytes: int | None = None) -> int:
        """Upper bound of the memory that the request's batch takes until it is answered, in bytes: the message, the
        arrays and the logprobs. `message_bytes`: size of the serialized request, if it is known."""
        num_bytes = request.ByteSize() if message_bytes is None else message_bytes
        for datum in request.data:
            num_bytes += _DATUM_BYTES + sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input)
            for name, tensor in datum.loss_fn_inputs.items():
                is_target = name == "target_tokens"
                num_bytes += tensors.num_elements(tensor) * _TARGET_BYTES if is_target else tensors.num_bytes(tensor)
        return num_bytes

    @classmethod
    def from_proto(
        cls,
        request: trainer_pb2.ForwardBackwardRequest,
        limits: Limits,
        *,
        held_bytes: int | None = None,
        max_bytes: int | None = None,
        check_loss: bool = True,
    ) -> Batch:
        """Makes and validates the batch of a request. Raises InvalidRequest or UnknownLossFn, which name the field and
        the value.

        `held_bytes`: `bytes_of(request)`, if it has been computed already. `max_bytes`: limit on `held_bytes`.
        `check_loss`: a custom loss is checked for every datum (see `with_loss_checked`). When it is false, only the
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
            held_bytes = cls.bytes_of(request)
        if max_bytes is not None and held_bytes > max_bytes:
            raise InvalidRequest(
                f"data: the batch and its answer take {held_bytes} bytes of memory, and this server allows {max_bytes} "
                "for one request (half of its max_queued_bytes); send fewer or shorter datums",
                field="data",
            )
        if request.loss_fn == CUSTOM:
            return cls._custom(request, limits, held_bytes, check_loss=check_loss)
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
        return cls(
            loss_fn=request.loss_fn,
            loss=loss,
            loss_config=config,
            forward_only=request.forward_only,
            datums=datums,
            held_bytes=held_bytes,
            request=request,
            model_id=request.model_id,
            seq_id=request.seq_id,
        )

    @classmethod
    def _custom(
        cls, request: trainer_pb2.ForwardBackwardRequest, limits: Limits, held_bytes: int, *, check_loss: bool
    ) -> Batch:
        if not request.HasField("custom_loss"):
            raise InvalidRequest(f"custom_loss: missing; loss_fn {CUSTOM!r} needs it", field="custom_loss")
        settings = [*request.loss_fn_config, *request.loss_fn_config_v2]
        if settings:
            where = _setting(request, settings[0])
            raise InvalidRequest(f"{where}: a custom loss takes no settings; custom_loss holds all of it", field=where)
        loss = CustomLoss.from_proto(request.custom_loss)
        _check_sparse_inputs(request)
        datums = [_custom_datum(one, loss, limits, field=f"data[{index}]") for index, one in enumerate(request.data)]
        _check_values(datums, (), limits)
        batch = cls(
            loss_fn=request.loss_fn,
            loss=loss,
            loss_config={},
            forward_only=request.forward_only,
            datums=datums,
            held_bytes=held_bytes,
            request=request,
            model_id=request.model_id,
            seq_id=request.seq_id,
        )
        if check_loss:
            return batch.with_loss_checked()
        largest = max(datums, key=lambda datum: datum.charge)
        (loss_s,) = loss.check_shapes([(largest.targets.shape, largest.inputs)])
        return replace(batch, datums=[replace(datum, loss_s=loss_s) for datum in datums])

    def with_loss_checked(self) -> Batch:
        """Checks a custom loss on the shapes of every datum, without data, and sets the datums' expected times.

        Returns the batch unchanged when its loss is built in. Raises InvalidRequest for a loss that this server does
        not run on datums of these shapes.
        """
        if not isinstance(self.loss, CustomLoss):
            return self
        expected = self.loss.check_shapes([(datum.targets.shape, datum.inputs) for datum in self.datums])
        datums = [replace(datum, loss_s=seconds) for datum, seconds in zip(self.datums, expected, strict=True)]
        return replace(self, datums=datums)

    def evaluate(self, logprobs: Sequence[Tensor], inputs: Sequence[Arrays]) -> Term:
        """The loss of some datums. A custom loss's time is counted even when it fails, as at its time limit."""
        started_s = time.perf_counter()
        try:
            return self.loss.evaluate(logprobs, inputs, self.loss_config)
        finally:
            if self.loss_fn == CUSTOM:
                self.loss_seconds += time.perf_counter() - started_s

    def add(self, loss: float, metrics: Mapping[str, float], mismatch: Mismatch | None) -> None:
        """Adds sums over datums that have run on this rank or another."""
        self.loss_sum += loss
        for key, value in metrics.items():
            self.metrics[key] = self.metrics.get(key, 0.0) + value
        if mismatch is not None:
            self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch

    def largest_ratio(self) -> str:
        """Describes the datum with the largest ratio of probabilities, as `describe_ratio` does, once all have run."""
        gaps = [log_ratio(*each) for each in zip(self.logprobs, self.datums, strict=True)]
        return describe_ratio(max(gaps), index=int(np.argmax(gaps)), seq_id=self.seq_id)

    def output(self) -> Output:
        """The result, once all datums have run."""
        return Output(
            logprobs=self.logprobs,
            metrics={
                "loss:sum": self.loss_sum,
                "num_sequences:sum": len(self.datums),
                "num_tokens:sum": self.num_tokens,
                **_reduced(self.metrics, num_datums=len(self.datums)),
                **({} if self.mismatch is None else self.mismatch.metrics()),
            },
        )


MicroBatch = Sequence[tuple[Batch, Sequence[int]]]
"""Batches with indices of their datums: what runs in one pass."""


@dataclass(frozen=True, slots=True)
class Example:
    """A datum of a batch, as a part of a micro-batch."""

    batch: Batch
    index: int

    @property
    def datum(self) -> Datum:
        return self.batch.datums[self.index]

    @property
    def model_id(self) -> str:
        return self.batch.model_id


def _check_targets(request: trainer_pb2.ForwardBackwardRequest, limits: Limits) -> None:
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
    datum: types_pb2.Datum, loss_fn: str, loss: Loss, config: Mapping[str, float], limits: Limits, *, field: str
) -> Datum:
    tokens = _tokens(datum, limits, field=field)
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
    return _fitting(Datum(tokens, targets, inputs), limits, field=field)


def _custom_datum(datum: types_pb2.Datum, loss: CustomLoss, limits: Limits, *, field: str) -> Datum:
    """Makes a datum for a custom loss. Its inputs keep their dtype and may have any shape of the declared rank.

    Inputs that the loss does not declare are ignored.
    """
    tokens = _tokens(datum, limits, field=field)
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
    return _fitting(Datum(tokens, targets, inputs), limits, field=field)


def _tokens(datum: types_pb2.Datum, limits: Limits, *, field: str) -> npt.NDArray[np.int32]:
    tokens = tensors.text_tokens(datum.model_input, field=f"{field}.model_input")
    if not 1 <= tokens.size <= limits.max_context_length:
        raise InvalidRequest(
            f"{field}.model_input: {tokens.size} tokens are outside 1..{limits.max_context_length}, "
            f"{limits.context_reason}",
            field=f"{field}.model_input",
        )
    return tokens


def _targets(
    datum: types_pb2.Datum, num_tokens: int, reader: str, ranks: tuple[int, ...], limits: Limits, *, field: str
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


def _fitting(datum: Datum, limits: Limits, *, field: str) -> Datum:
    """Returns the datum, or raises InvalidRequest when its arrays are too large for memory."""
    if limits.longest_datum is not None and datum.charge > limits.longest_datum:
        where = f"{field}.loss_fn_inputs.target_tokens"
        raise InvalidRequest(
            f"{where}: the datum's arrays, with targets of shape {list(datum.targets.shape)}, count as {datum.charge} "
            f"tokens, which is above {limits.longest_datum}, {_FITS_MEMORY}",
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


def _check_values(datums: Sequence[Datum], finite: Sequence[str], limits: Limits) -> None:
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


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one request."""

    logprobs: Sequence[Floats]
    """One array for each datum, with the shape of its targets."""
    metrics: Mapping[str, float]

    def to_proto(self) -> trainer_pb2.ForwardBackwardResponse:
        """Makes the response. Neighbouring datums with the same trailing shape share one record."""
        runs = [list(group) for _, group in groupby(self.logprobs, key=_trailing_shape)]
        return trainer_pb2.ForwardBackwardResponse(
            loss_fn_output_type=_TYPE,
            loss_fn_outputs=[
                types_pb2.ArrayRecord(type_tag=_TYPE, fields={"logprobs": tensors.batched(run)}, num_datums=len(run))
                for run in runs
            ],
            metrics=self.metrics,
        )


def _trailing_shape(array: npt.NDArray[Any]) -> tuple[int, ...]:
    return array.shape[1:]


def _reduced(sums: Mapping[str, float], *, num_datums: int) -> Mapping[str, float]:
    """Reduces sums over the datums: a metric whose key ends in ":mean" becomes the mean, the others stay sums."""
    return {key: value / num_datums if key.endswith(":mean") else value for key, value in sums.items()}


def log_ratio(logprobs: Floats, datum: Datum) -> float:
    """The largest difference, over a datum's targets, between the model's logprob and the sampling logprob.

    Returns -inf when the datum has no sampling logprobs or no difference is finite.
    """
    sampled = datum.inputs.get("logprobs")
    if sampled is None or sampled.shape != logprobs.shape:  # an input of a custom loss may have any shape
        return -math.inf
    gaps = logprobs.astype(np.float64) - sampled
    return float(np.max(gaps, where=np.isfinite(gaps), initial=-math.inf))


def describe_ratio(gap: float, *, index: int, seq_id: int) -> str:
    """Describes the datum with the largest ratio, for the end of an error message. `gap`: its `log_ratio`.

    Returns an empty text when the gap is -inf.
    """
    if gap == -math.inf:
        return ""
    return (
        f". The largest ratio is that of data[{index}] of seq_id {seq_id}: e^{gap:.4g}, the model's own probability of "
        "a target over that which `logprobs` say it was sampled with"
    )
