"""Answers about the service and keys, and the errors of all operations."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class Detail(TypedDict):
    detail: str


class Empty(TypedDict):
    pass


class Health(TypedDict):
    status: Literal["ok", "starting"]
    waiting_for: NotRequired[list[str]]


class ClientConfig(TypedDict):
    proto_compress_fwdbwd: bool
    fwdbwd_max_chunk_len: int
    fwdbwd_max_chunk_bytes_count: int
    pjwt_auth_enabled: bool
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool
    custom_loss_server_side: bool
    use_pyqwest_transport: bool


class DynamicConfig(TypedDict):
    sample_cancel_enabled: bool


class SupportedModel(TypedDict):
    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool
    one_by_one: NotRequired[str]


class Capabilities(TypedDict):
    supported_models: list[SupportedModel]


class Jwt(TypedDict):
    jwt: str


class OrganizationDetails(TypedDict):
    name: str


class UserDetails(TypedDict):
    email: str


class KeyDetails(TypedDict):
    org_details: OrganizationDetails
    user_details: UserDetails


class OwnKey(TypedDict):
    key_id: int
    name: str
    note: str
    details: KeyDetails


class Accepted(TypedDict):
    status: Literal["accepted"]
