"""Schemas of bodies and queries that have two forms, or that are checked without a schema, for the OpenAPI document."""

from __future__ import annotations

from pydantic import Field

from gateway import schemas
from gateway.schema_types import TinkerBody


class Datum(TinkerBody):
    model_input: schemas.ModelInput
    loss_fn_inputs: dict[str, schemas.TensorData]


class Batch(TinkerBody):
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackward(schemas.OperationIds):
    forward_backward_input: Batch


class Forward(schemas.OperationIds):
    forward_input: Batch


class LoadWeights(schemas.LoadWeightsFields):
    """session_id and model_seq_id for a new model, or model_id and seq_id for an existing one."""

    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=2**31)
    model_id: str | None = Field(default=None, min_length=1, max_length=300)
    seq_id: int | None = Field(default=None, ge=1, lt=2**31)


class SignedQuery(schemas.Query):
    """Parameters of a signed URL."""

    expires: int
    signature: str
